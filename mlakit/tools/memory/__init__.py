"""`mlakit memory`: the bytes of a model's KV cache, and how many tokens fit on a GPU.

    layers.py   the layers of a model that have a latent cache and an index-key cache
    gpus.py     the memory of known GPUs
    budget.py   bytes per token, per rank and per request; what fits
    report.py   the table and the chart

All sizes are computed: no cache is allocated and no GPU is needed.
"""

from mlakit.tools.memory.budget import Budget, MemoryReport, memory_report, parse_contexts
from mlakit.tools.memory.gpus import GPUS, gpu_bytes
from mlakit.tools.memory.layers import LayerCounts, layer_counts

__all__ = [
    "GPUS",
    "Budget",
    "LayerCounts",
    "MemoryReport",
    "gpu_bytes",
    "layer_counts",
    "memory_report",
    "parse_contexts",
]
