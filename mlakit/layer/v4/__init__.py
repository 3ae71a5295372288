"""The attention layers of DeepSeek-V4 over a paged cache.

attention.py   V4Attention: projections, norms, the attention of a layer
compressor.py  compressors, which pool windows of tokens to rows, and the indexer over such keys
cache.py       V4Cache: the rows of all layers in pages, by sequences
lanes.py       pages of rows that stand for so many tokens and live so long
batch.py       V4Batch: one step
checkpoint.py  a layer from safetensors files
from_hf.py     a layer from a module of transformers
"""

from mlakit.layer.v4.attention import V4Attention
from mlakit.layer.v4.batch import V4Batch
from mlakit.layer.v4.cache import V4Cache, V4Sequence

__all__ = ["V4Attention", "V4Batch", "V4Cache", "V4Sequence"]
