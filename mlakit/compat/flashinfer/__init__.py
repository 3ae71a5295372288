"""A drop-in for FlashInfer's MLA functions: its names, argument positions and conventions.

After `install()`, `import flashinfer` finds these functions: a program that uses FlashInfer for MLA
then runs on every device that mlakit supports. docs/flashinfer.md compares them one by one.

Conventions that differ from the rest of mlakit: lse is base 2, the cache is two tensors, prefill's
softmax scale defaults to d ** -0.5, and `causal` defaults to False.
"""

from mlakit.compat.flashinfer.cascade import merge_state, merge_state_in_place, merge_states
from mlakit.compat.flashinfer.installation import VERSION, install, uninstall
from mlakit.compat.flashinfer.mla import BatchMLAPagedAttentionWrapper
from mlakit.compat.flashinfer.page import (
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from mlakit.compat.flashinfer.prefill import (
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from mlakit.compat.flashinfer.topk import (
    top_k,
    top_k_page_table_transform,
    top_k_ragged_transform,
)
from mlakit.compat.flashinfer.trtllm import trtllm_batch_decode_with_kv_cache_mla
from mlakit.compat.installation import Installation

__version__ = VERSION

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "Installation",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "install",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "top_k",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "trtllm_batch_decode_with_kv_cache_mla",
    "uninstall",
]
