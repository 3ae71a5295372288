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
from mlakit.tools.memory import layer_counts
from mlakit.tools.memory.budget import CHECKPOINT_INDEX, checkpoint_bytes
from mlakit.tools.memory.gpus import GIB
from mlakit.tools.memory.layers import config_fields

# bytes of a parameter; embeddings of FP8 checkpoints stay in bf16
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Weights:
    """The weights of a model.

    total_bytes        of all weights
    source             where `total_bytes` comes from
    parameters         of the model, by its config; None if the config does not say
    expert_parameters  of these, those of routed experts
    experts            routed experts of a layer; 0 without
    experts_per_token  of these, those that a token takes
    """

    total_bytes: int
    source: str
    parameters: int | None = None
    expert_parameters: int = 0
    experts: int = 0
    experts_per_token: int = 0

    @property
    def expert_share(self) -> float:
        return 0.0 if not self.parameters else self.expert_parameters / self.parameters

    def experts_touched(self, tokens: int) -> float:
        """The share of a layer's routed experts that `tokens` tokens take, if routing is even."""
        if not self.experts:
            return 1.0
        return 1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens

    def bytes_read(self, tokens: int) -> float:
        """What a step of `tokens` tokens reads."""
        share = self.expert_share
        return self.total_bytes * (1.0 - share + share * self.experts_touched(tokens))

    def active_parameters(self) -> float:
        """Parameters that one token is multiplied by; without a count, one per byte."""
        if not self.parameters:
            return float(self.total_bytes)
        used = self.experts_per_token / self.experts if self.experts else 1.0
        return self.parameters - self.expert_parameters * (1.0 - used)


@dataclass(frozen=True)
class Parameters:
    """Counts by kind."""

    layers: int  # attention and MLPs, without routed experts
    experts: int
    embeddings: int
    routed: int
    active: int

    @property
    def total(self) -> int:
        return self.layers + self.experts + self.embeddings


def model_weights(config: str, weights_gib: float | None = None) -> Weights:
    """The weights of a model as `mlakit memory` names it. Raises ValueError if they are unknown.

    weights_gib  of the whole model, in place of what is found
    """
    if weights_gib is not None and not (isfinite(weights_gib) and weights_gib > 0):
        raise ValueError(f"weights must be above 0 GiB, got {weights_gib}")
    try:
        fields = config_fields(config)
        geometry = MLAGeometry.from_config(config)
    except (TypeError, OSError, KeyError) as error:
        raise ValueError(str(error)) from None
    unknown = ""
    counted: Parameters | None = None
    try:
        counted = count_parameters(fields, geometry)
    except (ValueError, TypeError) as error:
        unknown = str(error)
    if weights_gib is not None:
        total, source = int(weights_gib * GIB), "given"
    elif (stored := checkpoint_bytes(config)) is not None:
        total, source = stored, CHECKPOINT_INDEX
    elif stored := _file_bytes(config):
        total, source = stored, "the .safetensors files"
    elif counted is None:
        raise ValueError(f"{unknown}; give --weights GiB")
    else:
        total, source = _bytes_of(fields, counted)
    if counted is None:
        return Weights(total, source)
    return Weights(total, source, counted.total, counted.experts, counted.routed, counted.active)


def count_parameters(fields: ConfigFields, geometry: MLAGeometry) -> Parameters:
    """The parameters that a config implies. Raises ValueError for fields that it does not have."""
    if fields.get("model_type") in ("longcat_flash", "kimi_linear"):
        raise ValueError(
            f"{fields.source}: the parameters of {fields.get('model_type')} cannot be counted"
        )
    layers = layer_counts(fields)
    hidden, vocab = geometry.hidden_size, _integer(fields, "vocab_size")
    attention = layers.total * _attention(geometry) + layers.indexer * _indexer(geometry)
    routed = fields.get("n_routed_experts", fields.get("num_experts", 0))
    active = sparse = shared = width = 0
    if routed:
        active = _integer(fields, "num_experts_per_tok")
        sparse = layers.total - _dense_layers(fields, layers.total)
        shared = fields.get("n_shared_experts", 0)
        width = 3 * hidden * _integer(fields, "moe_intermediate_size")
    dense = (layers.total - sparse) * 3 * hidden * _integer(fields, "intermediate_size")
    mlps = dense + sparse * (shared * width + routed * hidden)  # and the router
    embeddings = vocab * hidden * (1 if fields.get("tie_word_embeddings", False) else 2)
    return Parameters(attention + mlps, sparse * routed * width, embeddings, routed, active)


def _attention(g: MLAGeometry) -> int:
    inner = g.q_lora_rank
    q = g.num_heads * g.qk_head_dim
    queries = g.hidden_size * q if inner is None else inner * (g.hidden_size + q)
    latents = g.hidden_size * (g.kv_lora_rank + g.qk_rope_head_dim)
    up = g.kv_lora_rank * g.num_heads * (g.qk_nope_head_dim + g.v_head_dim)
    return queries + latents + up + g.num_heads * g.v_head_dim * g.hidden_size


def _indexer(g: MLAGeometry) -> int:
    queries = (g.q_lora_rank or g.hidden_size) * g.index_n_heads * g.index_head_dim
    return queries + g.hidden_size * (g.index_head_dim + g.index_n_heads)


def _dense_layers(fields: ConfigFields, total: int) -> int:
    kinds = fields.get("mlp_layer_types")
    if kinds is not None:
        return sum(each == "dense" for each in list(kinds)[:total])
    return min(int(fields.get("first_k_dense_replace", 0)), total)


def _integer(fields: ConfigFields, name: str) -> int:
    if fields.get(name) is None:
        raise ValueError(f"{fields.source} has no {name}: its weights cannot be counted")
    return fields.integer(name)


def _bytes_of(fields: ConfigFields, counted: Parameters) -> tuple[int, str]:
    quantization = fields.get("quantization_config")
    dtype = str(fields.get("dtype", fields.get("torch_dtype", "bfloat16"))).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype}")
    if quantization is None:
        size = DTYPE_BYTES[dtype]
        return counted.total * size, f"{counted.total / 1e9:.1f} billion parameters in {dtype}"
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "fp8":
        raise ValueError(
            f"quant_method must be fp8 for a checkpoint without files to measure, got {method}; "
            "give --weights GiB"
        )
    total = counted.layers + counted.experts + counted.embeddings * DTYPE_BYTES[dtype]
    return total, f"{counted.total / 1e9:.1f} billion parameters in FP8"


def _file_bytes(config: str) -> int:
    path = config_path(config)
    if path is None:
        return 0
    return sum(file.stat().st_size for file in sorted(path.parent.glob("*.safetensors")))
