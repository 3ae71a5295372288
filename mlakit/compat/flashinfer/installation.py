"""`install()`: make `import flashinfer` find this package."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from mlakit.compat.flashinfer import cascade, mla, page, prefill, topk, trtllm
from mlakit.compat.installation import Alias, Installation

NAME = "flashinfer"
PACKAGE = __name__.rpartition(".")[0]
VERSION = "0.6.18"  # FlashInfer's, which callers check


def _by_name(*functions: Any) -> dict[str, object]:
    return {each.__name__: each for each in functions}


MLA = _by_name(mla.BatchMLAPagedAttentionWrapper)
TRTLLM = _by_name(trtllm.trtllm_batch_decode_with_kv_cache_mla)
PREFILL = _by_name(
    prefill.BatchPrefillWithRaggedKVCacheWrapper,
    prefill.single_prefill_with_kv_cache,
    prefill.single_prefill_with_kv_cache_return_lse,
)
CASCADE = _by_name(cascade.merge_state, cascade.merge_state_in_place, cascade.merge_states)
PAGE = _by_name(page.append_paged_mla_kv_cache, page.get_batch_indices_positions, page.get_seq_lens)
TOPK = _by_name(
    topk.TopKTieBreak,
    topk.top_k,
    topk.top_k_page_table_transform,
    topk.top_k_ragged_transform,
)


def install(*, force: bool = False) -> Installation:
    """Make `import flashinfer` find the functions of this package, where FlashInfer has them.

    Raises RuntimeError if another flashinfer is installed. With `force` this package replaces it
    until `uninstall`; modules that imported it before keep it. A second call has no effect.
    """
    return ALIAS.install(force=force)


def uninstall() -> None:
    """Undo `install`; no effect if it is not installed."""
    ALIAS.uninstall()


class GPUArchitectureError(RuntimeError):
    """FlashInfer raises it for a GPU that a function does not support; nothing here does."""


def build_nothing(*args: object, **options: object) -> None:
    """Take the place of what compiles FlashInfer's kernels: ours are compiled when they run."""


def has_flashinfer_jit_cache() -> bool:
    """Return True: no kernel of FlashInfer is left to compile."""
    return True


def is_sm90a_supported(device: torch.device) -> bool:
    """Return whether the device is an H100 or H200."""
    return _capability(device)[0] == 9


def is_sm100a_supported(device: torch.device) -> bool:
    """Return whether the device is a GPU of sm_100."""
    return _capability(device)[0] == 10


def is_sm110a_supported(device: torch.device) -> bool:
    """Return whether the device is a GPU of sm_110."""
    return _capability(device)[0] == 11


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def _capability(device: torch.device) -> tuple[int, int]:
    return (0, 0) if device.type != "cuda" else get_compute_capability(device)


UTILS = _by_name(
    GPUArchitectureError,
    get_compute_capability,
    has_flashinfer_jit_cache,
    is_sm90a_supported,
    is_sm100a_supported,
    is_sm110a_supported,
)
BUILDERS = ("gen_batch_mla_module", "gen_batch_prefill_module", "gen_single_prefill_module")


def _modules() -> Iterator[ModuleType]:
    root: dict[str, object] = {**MLA, **TRTLLM, **PREFILL, **CASCADE, **PAGE, **TOPK}
    yield ALIAS.module(NAME, __doc__, **root, __version__=VERSION)
    contents: dict[str, dict[str, object]] = {
        "mla": {**MLA, **TRTLLM},
        "decode": TRTLLM,
        "prefill": PREFILL,
        "cascade": CASCADE,
        "page": PAGE,
        "topk": TOPK,
        "utils": UTILS,
        "jit": {"build_jit_specs": build_nothing},
        "jit.attention": dict.fromkeys(BUILDERS, build_nothing),
    }
    for name, functions in contents.items():
        yield ALIAS.module(f"{NAME}.{name}", __doc__, **functions)


ALIAS = Alias(NAME, PACKAGE, _modules)
