"""Reference implementations: every kernel is tested against them.

Plain torch in float64, one request and one token at a time, with the equation in each docstring.
With a kernel's own `dtype` instead of float64, the same code is the naive run from which error
budgets are made. References take dequantised inputs, read nothing that is not attended to, and do
not round their results. The `*_stepwise` functions are the exception: they make the documented
roundings. `batched` has those of attention and selection for all queries of a request at once.

`lse` is natural log; for a query that sees no key it is -inf and the output is 0. A `sink` [heads]
is one more natural-log logit per head in the denominator of the output. It has no value, and does
not enter `lse` or `max_logits`.
"""

from __future__ import annotations

from mlakit.reference.append_rows import append_rows
from mlakit.reference.compress_rows import compress_rows
from mlakit.reference.decode import mla_decode
from mlakit.reference.fp8 import dequantize_fp8, quantize_fp8, scaled_mm_fp8
from mlakit.reference.indexer import indexer_logits, indexer_select, indexer_topk
from mlakit.reference.merge import merge_states
from mlakit.reference.norm_rope_quant import (
    append_positions,
    norm_rope_quant,
    norm_rope_quant_stepwise,
    rms_norm,
    rms_norm_stepwise,
    rotate,
    rotate_stepwise,
)
from mlakit.reference.physical_rows import physical_rows
from mlakit.reference.prefill import alibi_slopes, mla_prefill
from mlakit.reference.sparse import sparse_mla

__all__ = [
    "alibi_slopes",
    "append_positions",
    "append_rows",
    "compress_rows",
    "dequantize_fp8",
    "indexer_logits",
    "indexer_select",
    "indexer_topk",
    "merge_states",
    "mla_decode",
    "mla_prefill",
    "norm_rope_quant",
    "norm_rope_quant_stepwise",
    "physical_rows",
    "quantize_fp8",
    "rms_norm",
    "rms_norm_stepwise",
    "rotate",
    "rotate_stepwise",
    "scaled_mm_fp8",
    "sparse_mla",
]
