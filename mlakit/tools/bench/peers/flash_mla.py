"""FlashMLA: an installed `flash_mla`, or the build in vLLM's wheel.

Its sparse kernels take 64 or 128 heads. Fewer heads are padded with zeros, as engines do; this
happens before the clock starts, and the padding is cut from the result.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from torch import Tensor
from torch.nn.functional import pad

from mlakit.tools.bench.peers import fetched
from mlakit.tools.bench.peers.peer import Call, Peer, Unsupported, installed_or_fetched
from mlakit.tools.bench.problems import (
    LATENT,
    Attention,
    DenseDecode,
    DensePrefill,
    SparseDecode,
    SparsePrefill,
)

PAGE_SIZE = 64  # the dense kernel supports no other
SPARSE_HEADS = (64, 128)


def load() -> ModuleType:
    return installed_or_fetched("flash_mla", fetched.FLASH_MLA_WRAPPER, _load_fetched)


def _load_fetched(folder: Path) -> ModuleType:
    return fetched.load_wrapper(folder / fetched.FLASH_MLA_WRAPPER, "flash_mla")


def prepare(problem: Attention) -> Call:
    match problem:
        case DenseDecode():
            return _dense_decode(load(), problem)
        case SparsePrefill():
            return _sparse_prefill(load(), problem)
        case SparseDecode():
            return _sparse_decode(load(), problem)
        case DensePrefill():
            raise Unsupported("its dense prefill supports sm_100 only")


def _dense_decode(library: ModuleType, problem: DenseDecode) -> Call:
    page_size = problem.pages.shape[1]
    if page_size != PAGE_SIZE:
        raise Unsupported(f"supports a page size of {PAGE_SIZE}, not {page_size}")
    _, s_q, heads, _ = problem.q.shape
    # newer releases ignore the arguments and fill the schedule at the first call
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
    """q [..., h, 576] padded with zero heads to a supported number."""
    heads = q.shape[-2]
    for padded in SPARSE_HEADS:
        if heads <= padded:
            return pad(q, (0, 0, 0, padded - heads)) if heads < padded else q
    raise Unsupported(f"its sparse kernels support up to {SPARSE_HEADS[-1]} heads, not {heads}")


def _require_multiple(what: str, value: int, of: int) -> None:
    if value % of:
        raise Unsupported(f"needs a multiple of {of} for {what}, got {value}")


PEER = Peer("flash_mla", "FlashMLA", load, prepare, packages=("flash_mla",))
