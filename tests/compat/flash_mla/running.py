"""How FlashMLA's problems are run by the drop-in, and compared by FlashMLA's rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mlakit.compat.flash_mla import (
    flash_attn_varlen_func,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from tests.compat.flash_mla.dense_cases import FEW_DENSE, DenseCase, DenseProblem
from tests.compat.flash_mla.inputs import (
    DECODE_LSE,
    DENSE_OUT,
    PREFILL_LSE,
    PREFILL_OUT,
    SPARSE_OUT,
    VARLEN_OUT,
    Tolerance,
    assert_close,
)
from tests.compat.flash_mla.sparse_cases import (
    FEW_PREFILL,
    FEW_SPARSE,
    PrefillCase,
    PrefillProblem,
    SparseCase,
    SparseProblem,
)
from tests.compat.flash_mla.varlen_cases import FEW_VARLEN, VarlenCase, VarlenProblem


def run_dense(problem: DenseProblem, **others: Any) -> tuple[Tensor, Tensor]:
    case = problem.case
    return flash_mla_with_kvcache(
        problem.q,
        problem.k_cache,
        problem.block_table,
        problem.cache_seqlens,
        case.d_v,
        *get_mla_metadata(),
        causal=case.causal,
        **others,
    )


def run_sparse(problem: SparseProblem, **others: Any) -> tuple[Tensor, Tensor]:
    cache = problem.main.cache
    metadata = get_mla_metadata()
    return flash_mla_with_kvcache(
        problem.q, cache, None, None, 512, *metadata, *problem.arguments, **others
    )


def run_prefill(problem: PrefillProblem, **others: Any) -> tuple[Tensor, ...]:
    return flash_mla_sparse_fwd(
        problem.q,
        problem.kv,
        problem.indices,
        sm_scale=problem.scale,
        d_v=problem.case.d_v,
        attn_sink=problem.attn_sink,
        topk_length=problem.topk_length,
        **others,
    )


def run_varlen(problem: VarlenProblem, **others: Any) -> tuple[Tensor, Tensor]:
    case = problem.case
    return flash_attn_varlen_func(
        *problem.arguments,
        softmax_scale=case.scale,
        causal=case.causal,
        is_varlen=case.varlen,
        **others,
    )


KINDS: dict[type, tuple[Callable[..., Any], tuple[tuple[str, Tolerance], ...]]] = {
    DenseCase: (run_dense, (("out", DENSE_OUT), ("lse", DECODE_LSE))),
    SparseCase: (run_sparse, (("out", SPARSE_OUT), ("lse", DECODE_LSE))),
    PrefillCase: (
        run_prefill,
        (("out", PREFILL_OUT), ("max_logits", PREFILL_LSE), ("lse", PREFILL_LSE)),
    ),
    VarlenCase: (run_varlen, (("out", VARLEN_OUT), ("lse", PREFILL_LSE))),
}
FEW = [*FEW_DENSE, *FEW_SPARSE, *FEW_PREFILL, *FEW_VARLEN]


def check(problem: Any, got: tuple[Tensor, ...], answer: tuple[Tensor, ...] | None = None) -> None:
    """By FlashMLA's rule, against the problem's answer or the one that is given."""
    _, rules = KINDS[type(problem.case)]
    wanted = problem.answer() if answer is None else answer
    for (name, tolerance), actual, want in zip(rules, got, wanted, strict=True):
        assert_close(f"{name} of {problem.case}", actual, want, tolerance)


def check_all(listed: Iterable[Any], device: torch.device) -> None:
    for seed, case in enumerate(listed):
        problem = case.make(device, seed)
        check(problem, KINDS[type(case)][0](problem))


def check_all_by_heads(
    listed: Iterable[SparseCase], device: torch.device, heads: Sequence[int]
) -> None:
    """Each problem, and those of its first `heads`: their answers are part of the whole one's."""
    for seed, case in enumerate(listed):
        problem = case.make(device, seed)
        out, lse = problem.answer()
        for count in heads:
            own = problem.of_heads(count)
            check(own, run_sparse(own), (out[:, :, :count], lse[:, :count]))
