"""The documented MLA functions of Modular's MAX kernels, with their names and argument orders.

Compile-time parameters are keyword arguments, pointers are optional tensors, and there is no
context argument. Each function writes its outputs in place and returns its main output. Integer
tensors may be int32, int64 or uint32.
"""

from mlakit.compat.modular.collection import KeyCache, KVCollection
from mlakit.compat.modular.decoding import MLAConfig, flare_mla_decoding
from mlakit.compat.modular.dispatch_scalars import compute_mla_dispatch_scalars
from mlakit.compat.modular.masks import (
    CausalMask,
    ChunkedCausalMask,
    ChunkedMask,
    NullMask,
    SlidingWindowCausalMask,
    SlidingWindowNonCausalMask,
)
from mlakit.compat.modular.planning import mla_prefill_plan
from mlakit.compat.modular.prefill import mla_prefill_branch_fp8
from mlakit.compat.modular.rope_norm import (
    fused_rope_rmsnorm_quantization_kernel,
    mla_fused_rope_rmsnorm_quantization,
)
from mlakit.compat.modular.sparse import mla_sm100_prefill_sparse

__all__ = [
    "CausalMask",
    "ChunkedCausalMask",
    "ChunkedMask",
    "KVCollection",
    "KeyCache",
    "MLAConfig",
    "NullMask",
    "SlidingWindowCausalMask",
    "SlidingWindowNonCausalMask",
    "compute_mla_dispatch_scalars",
    "flare_mla_decoding",
    "fused_rope_rmsnorm_quantization_kernel",
    "mla_fused_rope_rmsnorm_quantization",
    "mla_prefill_branch_fp8",
    "mla_prefill_plan",
    "mla_sm100_prefill_sparse",
]
