"""The bytes of a model's weights, without reading them.

They come from the index of a checkpoint (`total_size`), else from the sizes of its .safetensors
files, else from the parameters that the config implies. Layers for multi-token prediction count in
the first two only.
"""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

from mlakit.model.config import ConfigFields, config_path
from mlakit.model.geometry import MLAGeometry
from mlakit.model.releases import HY4, is_longcat_type
from mlakit.tools.memory.budget import CHECKPOINT_INDEX, GIB, checkpoint_bytes
from mlakit.tools.memory.layers import layer_counts, read_model

# bytes of a parameter; embeddings of FP8 checkpoints stay in bf16
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Weights(NamedTuple):
    """All weights of a model, and where the number of bytes comes from."""

    total_bytes: int
    source: str


def model_weights(config: str, weights_gib: float | None = None) -> Weights:
    """The weights of a model as `mlakit memory` names it. Raises ValueError if they are unknown.

    weights_gib  of the whole model, in place of what is found
    """
    if weights_gib is not None:
        if not (isfinite(weights_gib) and weights_gib > 0):
            raise ValueError(f"weights must be above 0 GiB, got {weights_gib}")
        return Weights(int(weights_gib * GIB), "given")
    if (stored := checkpoint_bytes(config)) is not None:
        return Weights(stored, CHECKPOINT_INDEX)
    path = config_path(config)
    files = [] if path is None else path.parent.glob("*.safetensors")
    if stored := sum(file.stat().st_size for file in files):
        return Weights(stored, "the .safetensors files")
    fields, geometry, _ = read_model(config)
    try:
        return _counted(fields, *count_parameters(fields, geometry))
    except TypeError as error:  # a field of another type
        raise ValueError(str(error)) from None


def count_parameters(fields: ConfigFields, geometry: MLAGeometry) -> tuple[int, int]:
    """(parameters without embeddings, those of the embeddings) that a config implies.

    Raises ValueError for fields that it does not have.
    """
    layers, g = layer_counts(fields), geometry
    kind = fields.get("model_type")
    if is_longcat_type(kind) or kind == "kimi_linear" or layers.mla < layers.total:
        raise ValueError(
            f"{fields.source}: the parameters of {kind} cannot be counted; give --weights GiB"
        )
    hidden, heads, inner = g.hidden_size, g.num_heads, g.q_lora_rank
    q = heads * g.qk_head_dim
    attention = hidden * q if inner is None else inner * (hidden + q)
    attention += hidden * g.row.width
    attention += g.kv_lora_rank * heads * (g.qk_nope_head_dim + g.v_head_dim)
    # Hy4 has a gate as large as the output projection
    attention += heads * g.v_head_dim * hidden * (2 if kind == HY4 else 1)
    index = (inner or hidden) * g.index_n_heads * g.index_head_dim
    index += hidden * (g.index_head_dim + g.index_n_heads)
    routed = fields.get("n_routed_experts", fields.get("num_experts", 0))
    sparse = experts = 0
    if routed:
        kinds = fields.get("mlp_layer_types")
        if kinds is None:
            dense = min(int(fields.get("first_k_dense_replace", 0)), layers.total)
        else:
            dense = list(kinds)[: layers.total].count("dense")
        sparse = layers.total - dense
        expert = 3 * hidden * _integer(fields, "moe_intermediate_size")
        experts = (routed + fields.get("n_shared_experts", 0)) * expert
        experts += routed * hidden  # the router
    mlps = (layers.total - sparse) * 3 * hidden * _integer(fields, "intermediate_size")
    vocab = _integer(fields, "vocab_size") * hidden
    embeddings = vocab if fields.get("tie_word_embeddings", False) else 2 * vocab
    rest = layers.total * attention + layers.indexer * index + mlps + sparse * experts
    return rest, embeddings


def _integer(fields: ConfigFields, name: str) -> int:
    if fields.get(name) is None:
        raise ValueError(
            f"{fields.source} has no {name}: its weights cannot be counted; give --weights GiB"
        )
    return fields.integer(name)


def _counted(fields: ConfigFields, rest: int, embeddings: int) -> Weights:
    quantization = fields.get("quantization_config")
    dtype = str(fields.get("dtype", fields.get("torch_dtype", "bfloat16"))).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype}")
    billions = f"{(rest + embeddings) / 1e9:.1f} billion parameters in"
    if quantization is None:
        return Weights((rest + embeddings) * DTYPE_BYTES[dtype], f"{billions} {dtype}")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "fp8":
        raise ValueError(
            f"quant_method must be fp8 for a checkpoint without files to measure, got {method}; "
            "give --weights GiB"
        )
    return Weights(rest + embeddings * DTYPE_BYTES[dtype], f"{billions} FP8")
