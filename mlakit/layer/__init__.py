"""One attention layer as a module: from hidden states to hidden states over a paged cache.

attention.py   MLAAttention: projections, norms, the steps of `mlakit.steps`
indexer.py     LightningIndexer of DeepSeek-V3.2
config.py      LayerConfig: what a model's config says of one layer
linear.py      linear maps of float or block-FP8 weights, RMSNorm
rotary.py      one RoPE table for all layers
checkpoint.py  a layer from safetensors files
from_hf.py     a layer from a module of transformers
v4             V4Attention, the layers of DeepSeek-V4, and their cache
"""

from mlakit.layer.attention import MLAAttention
from mlakit.layer.config import LayerConfig, QueryScale
from mlakit.layer.indexer import LightningIndexer
from mlakit.layer.v4 import V4Attention, V4Batch, V4Cache

__all__ = [
    "LayerConfig",
    "LightningIndexer",
    "MLAAttention",
    "QueryScale",
    "V4Attention",
    "V4Batch",
    "V4Cache",
]
