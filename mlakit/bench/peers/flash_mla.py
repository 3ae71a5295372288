"""FlashMLA: an installed `flash_mla`, or the one out of vLLM's wheel.

Its sparse kernels want 64 or 128 heads. Fewer are padded with zeros, as engines do, here before the
clock starts; the padding is not part of the result.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from torch import Tensor
from torch.nn.functional import pad

from mlakit.bench.peers import folder
from mlakit.bench.peers.peer import Call, CannotTake, Peer, installed_or_fetched
from mlakit.bench.problems import (
    LATENT,
    DenseDecode,
    DensePrefill,
    Problem,
    SparseDecode,
    SparsePrefill,
)

PAGE_SIZE = 64  # the only one of its dense kernel
SPARSE_HEADS = (64, 128)


def load() -> ModuleType:
    return installed_or_fetched("flash_mla", folder.FLASH_MLA_WRAPPER, _load_fetched)


def _load_fetched(fetched: Path) -> ModuleType:
    return folder.load_wrapper(fetched / folder.FLASH_MLA_WRAPPER, "flash_mla")


def prepare(problem: Problem) -> Call:
    match problem:
        case DenseDecode():
            return _dense_decode(load(), problem)
        case SparsePrefill():
            return _sparse_prefill(load(), problem)
        case SparseDecode():
            return _sparse_decode(load(), problem)
        case DensePrefill():
            raise CannotTake("its dense prefill is for sm_100 only")


def _dense_decode(library: ModuleType, problem: DenseDecode) -> Call:
    page_size = problem.pages.shape[1]
    if page_size != PAGE_SIZE:
        raise CannotTake(f"its pages have {PAGE_SIZE} rows, not {page_size}")
    _, s_q, heads, _ = problem.q.shape
    # newer releases ignore the arguments, and fill the schedule in at the first call
    schedule, num_splits = library.get_mla_metadata(problem.kv_lens, s_q * heads, 1)
    pages = problem.pages.unsqueeze(2)  # [pages, page_size, 1, 576]

    def call() -> Tensor:
        out: Tensor = library.flash_mla_with_kvcache(
            problem.q,
            pages,
            problem.page_table,
            problem.kv_lens,
            LATENT,
            schedule,
            num_splits,
            softmax_scale=problem.softmax_scale,
            causal=problem.causal,
        )[0]
        return out

    return call


def _sparse_prefill(library: ModuleType, problem: SparsePrefill) -> Call:
    _require_multiple("topk", problem.indices.shape[-1], 128)
    heads = problem.q.shape[1]
    q = _pad_heads(problem.q)
    kv, indices = problem.kv.unsqueeze(1), problem.indices.unsqueeze(1)

    def call() -> Tensor:
        out: Tensor = library.flash_mla_sparse_fwd(q, kv, indices, problem.softmax_scale)[0]
        return out[:, :heads]

    return call


def _sparse_decode(library: ModuleType, problem: SparseDecode) -> Call:
    _require_multiple("topk", problem.indices.shape[-1], 64)
    heads = problem.q.shape[2]
    q = _pad_heads(problem.q)
    pages = problem.pages.unsqueeze(2)  # [pages, page_size, 1, 656]
    schedule, _ = library.get_mla_metadata()

    def call() -> Tensor:
        out: Tensor = library.flash_mla_with_kvcache(
            q,
            pages,
            None,
            None,
            LATENT,
            schedule,
            softmax_scale=problem.softmax_scale,
            is_fp8_kvcache=True,
            indices=problem.indices,
        )[0]
        return out[:, :, :heads]

    return call


def _pad_heads(q: Tensor) -> Tensor:
    """q [..., h, 576] with zeros for the heads up to a number that has a kernel."""
    heads = q.shape[-2]
    for padded in SPARSE_HEADS:
        if heads <= padded:
            return pad(q, (0, 0, 0, padded - heads)) if heads < padded else q
    raise CannotTake(f"its sparse kernels take up to {SPARSE_HEADS[-1]} heads, not {heads}")


def _require_multiple(what: str, value: int, of: int) -> None:
    if value % of:
        raise CannotTake(f"its {what} is a multiple of {of}, not {value}")


PEER = Peer("flash_mla", load, prepare)
