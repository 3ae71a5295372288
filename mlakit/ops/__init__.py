"""The public functions: validate, select, allocate, launch. Each docstring is the contract."""

from mlakit.ops.append_rows import append_rows
from mlakit.ops.compress_rows import compress_rows
from mlakit.ops.decode import mla_decode
from mlakit.ops.fp8 import quantize_fp8, scaled_mm_fp8
from mlakit.ops.indexer import indexer_logits, indexer_topk
from mlakit.ops.indexer_select import indexer_select
from mlakit.ops.matmul import batched_matmul
from mlakit.ops.merge import merge_states
from mlakit.ops.norm_rope_quant import norm_rope_quant_append
from mlakit.ops.physical_rows import physical_rows
from mlakit.ops.prefill import mla_prefill
from mlakit.ops.sparse import ExtraRows, sparse_mla

__all__ = [
    "ExtraRows",
    "append_rows",
    "batched_matmul",
    "compress_rows",
    "indexer_logits",
    "indexer_select",
    "indexer_topk",
    "merge_states",
    "mla_decode",
    "mla_prefill",
    "norm_rope_quant_append",
    "physical_rows",
    "quantize_fp8",
    "scaled_mm_fp8",
    "sparse_mla",
]
