"""The columns that GLM-5.3-Flash selects, for the attention function in place of a mask.

Its modules make a mask of the columns that their indexer selected, and its indexer pools keys. A
patched module hands the columns to the attention function, which reads those rows only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_MASK, _VISIBLE = "build_attention_mask_from_topk", "get_visible_tokens"


class SelectedColumns(NamedTuple):
    """The columns [batch, length, topk] of each query's keys; −1 selects nothing."""

    indices: Tensor


def pools_keys(module: nn.Module) -> bool:
    """Whether the module makes a mask of columns, which only those with pooled keys do."""
    return hasattr(type(module), _MASK)


def selects_all(module: nn.Module) -> bool:
    """Whether a selection of as many columns as there are tokens has every visible token.

    Tokens after the last complete pool are selected only if the config says so.
    """
    config: Any = module.config
    return getattr(config, "index_kpool_always_select_tail", True) or config.index_kpool == 1


def hand_over(module: nn.Module) -> None:
    """Have the module pass on what its indexer selects, while it is patched."""
    if not pools_keys(module):
        return
    module.__dict__[_MASK] = _columns
    if module.indexer is not None:  # else it takes the selection of a layer before it
        module.indexer.__dict__[_VISIBLE] = _visible_tokens


def undo(module: nn.Module) -> None:
    """Have the module make a mask again."""
    if pools_keys(module):
        module.__dict__.pop(_MASK, None)
        getattr(module.indexer, "__dict__", {}).pop(_VISIBLE, None)


def _columns(topk_indices: Tensor, query_states: Tensor, kv_length: int) -> SelectedColumns:
    return SelectedColumns(topk_indices)


def _visible_tokens(valid_keys: Tensor, q_length: int, current_length: int) -> Tensor:
    """Return [batch, q_length, columns], True where a new token sees a column.

    The last columns are the new tokens. A latent layer counts them only after the forward, so its
    current_length is another.
    """
    column = torch.arange(valid_keys.shape[-1], device=valid_keys.device)
    query = column[-q_length:, None]
    return (column <= query) & valid_keys[:, None]
