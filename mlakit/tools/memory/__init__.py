"""`mlakit memory`: the bytes of a model's KV cache, and how many tokens fit on a GPU.

    layers.py   the layers of a model that have a latent cache and an index-key cache
    budget.py   bytes per token, per rank and per request; what fits; the table

All sizes are computed: no cache is allocated and no GPU is needed.
"""

from mlakit.tools.memory.budget import (
    CHECKPOINT_INDEX,
    GIB,
    CacheSize,
    MemoryReport,
    checkpoint_bytes,
    latent_size,
    memory_report,
    parse_contexts,
    read_model,
    table,
)
from mlakit.tools.memory.layers import LayerCounts, layer_counts

__all__ = [
    "CHECKPOINT_INDEX",
    "GIB",
    "CacheSize",
    "LayerCounts",
    "MemoryReport",
    "checkpoint_bytes",
    "latent_size",
    "layer_counts",
    "memory_report",
    "parse_contexts",
    "read_model",
    "table",
]
