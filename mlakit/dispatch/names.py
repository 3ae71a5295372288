"""Names of ops, backends and their kernels, for types, help texts and shell completion.

Nothing here waits for torch. To add a backend, add its name to `Backend`: `dispatch.selection` then
reads the kernels of `mlakit.kernels.<name>.support.SPECS`, and `explain`, `support`, the command
line and every error know it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

Backend = Literal["auto", "blackwell", "hopper", "triton", "cpu"]
"""What the argument `backend` may be: "auto" takes the fastest that can."""
# on a GPU `auto` asks them in this order, fastest first
BACKENDS: tuple[Backend, ...] = get_args(Backend)
# one kernel of a backend, where `mla_decode` has several there
DecodeKernel = Literal[
    "blackwell:n64_bf16",
    "blackwell:n64_fp8_kv",
    "hopper:m64_bf16",
    "hopper:m64_fp8_qk",
    "hopper:m64_fp8_kv",
    "hopper:small_m_bf16",
    "hopper:small_m_fp8_kv",
    "hopper:small_m_fp4_kv",
]

# in the order of `dispatch.OPS`, which a test holds them to
OPS = (
    "norm_rope_quant_append",
    "append_rows",
    "compress_rows",
    "batched_matmul",
    "quantize_fp8",
    "scaled_mm_fp8",
    "mla_prefill",
    "mla_decode",
    "sparse_mla",
    "indexer_logits",
    "indexer_topk",
    "indexer_select",
    "physical_rows",
    "merge_states",
)


def one_of(names: Sequence[str]) -> str:
    """`a, b or c`"""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
