"""What several functions share: the base of lse, refusals by name, pools of two tensors."""

from __future__ import annotations

from math import e, log, log2
from typing import Any

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.dispatch.checks import E4M3, FLOATS, Dims, UnsupportedError

LOG2_E = log2(e)  # FlashInfer's lse is base 2, ours natural
LN_2 = log(2)

# what these arguments must be left at, where None is not the only such value
NEUTRAL: dict[str, tuple[object, ...]] = {
    "pos_encoding_mode": ("NONE",),
    "window_left": (-1,),
    "logits_soft_cap": (0, 0.0),
    "token_pos_in_items_len": (0,),
    "use_profiler": (False,),
    "use_fp16_softmax": (False,),
    "uses_shared_paged_kv_idx": (True,),
    "dsa_graph_safe": (False,),
}


def refuse(op: str, **given: Any) -> None:
    """Refuse arguments of FlashInfer that no kernel takes, unless they say what None says."""
    for name, value in given.items():
        neutral = (None, *NEUTRAL.get(name, ()))
        if any(value is each for each in neutral):
            continue
        if isinstance(value, (int, float, str)) and value in neutral:
            continue
        must = repr(neutral[-1])
        got = "a tensor" if isinstance(value, Tensor) else repr(value)
        raise UnsupportedError(f"{op}: {name} must be {must}, got {got}")


def one_of(dims: Dims, arg: str, value: object, *known: str) -> None:
    """Require a name that FlashInfer knows; it has no effect here."""
    dims.require(value in known, arg, f"be one of {', '.join(known)}", repr(value))


def page_table_of(first: Tensor, kv_indices: Tensor, columns: int) -> Tensor:
    """int32 [batch, columns]: the pages in kv_indices from `first` [batch] on.

    Past a request's pages are others that exist, which no op reads.
    """
    entries = first[:, None] + torch.arange(columns, device=first.device)
    return kv_indices[entries.clamp_max(len(kv_indices) - 1)].int()


def split_pool(
    dims: Dims, ckv_cache: Tensor, kpe_cache: Tensor, *, tensor_scale: float = 1.0
) -> PagedLatentCache:
    """The pool whose latent and rope columns are these tensors [pages, page_size, columns]."""
    dims.match("ckv_cache", ckv_cache, "pages", "page_size", "ckv", dtypes=(*FLOATS, E4M3))
    dims.match("kpe_cache", kpe_cache, "pages", "page_size", "kpe", dtypes=[ckv_cache.dtype])
    return PagedLatentCache.wrap_split(ckv_cache, kpe_cache, tensor_scale=tensor_scale)
