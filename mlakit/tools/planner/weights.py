"""The weights of a model: bytes of its checkpoint, and how they divide into experts and the rest.

Bytes come from the index of a checkpoint (`total_size`), else from the sizes of its .safetensors
files, else from the parameters that the config implies. Layers for multi-token prediction count in
the first two only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from mlakit.model.config import ConfigFields, config_path
from mlakit.model.geometry import MLAGeometry
from mlakit.tools.memory import CHECKPOINT_INDEX, GIB, checkpoint_bytes, layer_counts, read_model

# bytes of a parameter; embeddings of FP8 checkpoints stay in bf16
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters by kind. `rest` is attention, and MLPs without routed experts."""

    rest: int
    experts: int
    embeddings: int
    routed: int = 0  # experts of a layer
    active: int = 0  # of these, those that a token takes

    @property
    def total(self) -> int:
        return self.rest + self.experts + self.embeddings


@dataclass(frozen=True)
class Weights:
    """All weights of a model. `parameters` is None if the config does not determine them."""

    total_bytes: int
    source: str
    parameters: Parameters | None = None

    def bytes_read(self, tokens: int) -> float:
        """What a step of `tokens` tokens reads, if they are routed evenly to the experts."""
        found = self.parameters
        if found is None or not found.routed:
            return float(self.total_bytes)
        untouched = (1.0 - found.active / found.routed) ** tokens
        return self.total_bytes * (1.0 - untouched * found.experts / found.total)

    @property
    def active_parameters(self) -> float:
        """Parameters that one token is multiplied by; without a count, one per byte."""
        found = self.parameters
        if found is None:
            return float(self.total_bytes)
        used = found.active / found.routed if found.routed else 1.0
        return found.total - found.experts * (1.0 - used)


def model_weights(config: str, weights_gib: float | None = None) -> Weights:
    """The weights of a model as `mlakit memory` names it. Raises ValueError if they are unknown.

    weights_gib  of the whole model, in place of what is found
    """
    if weights_gib is not None and not (isfinite(weights_gib) and weights_gib > 0):
        raise ValueError(f"weights must be above 0 GiB, got {weights_gib}")
    fields, geometry, _ = read_model(config)
    unknown = ""
    counted: Parameters | None = None
    try:
        counted = count_parameters(fields, geometry)
    except (ValueError, TypeError) as error:
        unknown = str(error)
    if weights_gib is not None:
        return Weights(int(weights_gib * GIB), "given", counted)
    if (stored := checkpoint_bytes(config)) is not None:
        return Weights(stored, CHECKPOINT_INDEX, counted)
    path = config_path(config)
    files = [] if path is None else path.parent.glob("*.safetensors")
    if stored := sum(file.stat().st_size for file in files):
        return Weights(stored, "the .safetensors files", counted)
    if counted is None:
        raise ValueError(f"{unknown}; give --weights GiB")
    return Weights(*_bytes_of(fields, counted), counted)


def count_parameters(fields: ConfigFields, geometry: MLAGeometry) -> Parameters:
    """The parameters that a config implies. Raises ValueError for fields that it does not have."""
    if fields.get("model_type") in ("longcat_flash", "kimi_linear"):
        raise ValueError(
            f"{fields.source}: the parameters of {fields.get('model_type')} cannot be counted"
        )
    layers, g = layer_counts(fields), geometry
    hidden, heads, inner = g.hidden_size, g.num_heads, g.q_lora_rank
    q = heads * g.qk_head_dim
    attention = hidden * q if inner is None else inner * (hidden + q)
    attention += hidden * g.row.width
    attention += g.kv_lora_rank * heads * (g.qk_nope_head_dim + g.v_head_dim)
    attention += heads * g.v_head_dim * hidden
    index = (inner or hidden) * g.index_n_heads * g.index_head_dim
    index += hidden * (g.index_head_dim + g.index_n_heads)
    routed = fields.get("n_routed_experts", fields.get("num_experts", 0))
    active = sparse = shared = width = 0
    if routed:
        active = _integer(fields, "num_experts_per_tok")
        kinds = fields.get("mlp_layer_types")
        if kinds is None:
            dense = min(int(fields.get("first_k_dense_replace", 0)), layers.total)
        else:
            dense = list(kinds)[: layers.total].count("dense")
        sparse = layers.total - dense
        shared = fields.get("n_shared_experts", 0)
        width = 3 * hidden * _integer(fields, "moe_intermediate_size")
    mlps = (layers.total - sparse) * 3 * hidden * _integer(fields, "intermediate_size")
    mlps += sparse * (shared * width + routed * hidden)  # and the router
    vocab = _integer(fields, "vocab_size") * hidden
    embeddings = vocab if fields.get("tie_word_embeddings", False) else 2 * vocab
    rest = layers.total * attention + layers.indexer * index + mlps
    return Parameters(rest, sparse * routed * width, embeddings, routed, active)


def _integer(fields: ConfigFields, name: str) -> int:
    if fields.get(name) is None:
        raise ValueError(f"{fields.source} has no {name}: its weights cannot be counted")
    return fields.integer(name)


def _bytes_of(fields: ConfigFields, counted: Parameters) -> tuple[int, str]:
    quantization = fields.get("quantization_config")
    dtype = str(fields.get("dtype", fields.get("torch_dtype", "bfloat16"))).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype}")
    billions = f"{counted.total / 1e9:.1f} billion parameters in"
    if quantization is None:
        return counted.total * DTYPE_BYTES[dtype], f"{billions} {dtype}"
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "fp8":
        raise ValueError(
            f"quant_method must be fp8 for a checkpoint without files to measure, got {method}; "
            "give --weights GiB"
        )
    total = counted.rest + counted.experts + counted.embeddings * DTYPE_BYTES[dtype]
    return total, f"{billions} FP8"
