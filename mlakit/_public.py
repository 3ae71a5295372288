"""The public names of `mlakit`, imported on first use. Add a new public name here."""

from mlakit.cache import (
    KVShard,
    PagedLatentCache,
    gather_rows,
    request_slots,
    token_requests,
    token_slots,
)
from mlakit.cache.pages import OutOfPagesError, PageAllocator, PagedSequence
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.statistics import stats
from mlakit.formats import format_of_dtype
from mlakit.layer import LightningIndexer, MLAAttention, V4Attention, V4Batch, V4Cache
from mlakit.model.geometry import MLAGeometry, RopeParameters, RowShape
from mlakit.model.masks import CAUSAL, NULL, Mask
from mlakit.model.rope import rope_table
from mlakit.ops import (
    ExtraRows,
    append_rows,
    compress_rows,
    indexer_logits,
    indexer_select,
    indexer_topk,
    merge_states,
    mla_decode,
    mla_prefill,
    norm_rope_quant_append,
    physical_rows,
    quantize_fp8,
    scaled_mm_fp8,
    sparse_mla,
)
from mlakit.ops.decode_plan import plan_mla_decode
from mlakit.parallel import (
    context_parallel_decode,
    context_parallel_sparse_step,
    merge_over_ranks,
    tensor_parallel_plan,
)
from mlakit.plan import EvenSplit, plan_context, plan_decode
from mlakit.precompile import warmup
from mlakit.steps import (
    CachedBatch,
    IndexInputs,
    LayerWeights,
    PooledKeyCache,
    PooledKeys,
    decode_attend,
    decode_branch,
    mla_step,
    plan_step,
    prefill_attend,
    prefill_branch,
    sparse_step,
)
from mlakit.steps.weights import UpProjection

__all__ = [
    "CAUSAL",
    "NULL",
    "CachedBatch",
    "EvenSplit",
    "ExtraRows",
    "IndexInputs",
    "KVShard",
    "LayerWeights",
    "LightningIndexer",
    "MLAAttention",
    "MLAGeometry",
    "Mask",
    "OutOfPagesError",
    "PageAllocator",
    "PagedLatentCache",
    "PagedSequence",
    "PooledKeyCache",
    "PooledKeys",
    "RopeParameters",
    "RowShape",
    "UnsupportedError",
    "UpProjection",
    "V4Attention",
    "V4Batch",
    "V4Cache",
    "append_rows",
    "compress_rows",
    "context_parallel_decode",
    "context_parallel_sparse_step",
    "decode_attend",
    "decode_branch",
    "format_of_dtype",
    "gather_rows",
    "indexer_logits",
    "indexer_select",
    "indexer_topk",
    "merge_over_ranks",
    "merge_states",
    "mla_decode",
    "mla_prefill",
    "mla_step",
    "norm_rope_quant_append",
    "physical_rows",
    "plan_context",
    "plan_decode",
    "plan_mla_decode",
    "plan_step",
    "prefill_attend",
    "prefill_branch",
    "quantize_fp8",
    "request_slots",
    "rope_table",
    "scaled_mm_fp8",
    "sparse_mla",
    "sparse_step",
    "stats",
    "tensor_parallel_plan",
    "token_requests",
    "token_slots",
    "warmup",
]
