"""`generate_batch`, the continuous batching of transformers 5.17, over latent rows.

Its cache has pages of one row per layer; its lists of slots are flat page tables. It sizes a row as
`num_key_value_heads` x `head_dim` of the config, so the config has one head as wide as a latent row
while `generate_batch` runs. Other releases have other internals and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mlakit import (
    CachedBatch,
    PagedLatentCache,
    UnsupportedError,
    append_rows,
    decode_attend,
    format_of_dtype,
)
from mlakit.integrations.transformers import checks
from mlakit.integrations.transformers.attention import up_projection
from mlakit.integrations.transformers.selected_columns import pools_keys

RELEASE = "5.17."
# arguments of a paged attention function that only describe the batch
DESCRIPTIVE = frozenset(
    {"block_table", "logits_indices", "logits_processor_args", "max_seqlen_k", "max_seqlen_q"}
)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    cache: Any = None,
    read_index: Any = None,
    write_index: Any = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Append the new tokens to their slots, and attend to the slots of every request.

    query  [1, heads, tokens, D_N + D_R], rotated; tokens after the last request's are padding
    key    [1, 1, tokens, D_C] latents;  value [1, 1, tokens, D_R] rotated keys
    read_index, write_index  slots per group of layers; no slots to read where nothing is cached
    """
    described = {name: value for name, value in others.items() if name not in DESCRIPTIVE}
    checks.check_patched(module)
    checks.check_attention_arguments(module, dropout, described)
    up = up_projection(module)
    row = up.geometry.row
    group, index = cache.layer_index_to_group_indices[module.layer_idx]
    slots: Tensor = cache.key_cache[index]
    if slots.shape[1:] != (1, row.width):
        raise UnsupportedError(
            "mlakit: continuous batching is supported by generate_batch of the patched model only"
        )
    pool = PagedLatentCache.wrap(slots, row, format=format_of_dtype(slots.dtype))
    written, read = write_index[group], read_index[group]
    count = len(written)
    append_rows(key[0, 0, :count], value[0, 0, :count], pool, written)
    q_starts, kv_starts = cu_seq_lens_q.int(), cu_seq_lens_k.int()
    table = (kv_starts, read if read.numel() else written)
    batch = CachedBatch(pool, table, kv_starts.diff(), q_starts)
    scale = float(module.scaling if scaling is None else scaling)  # type: ignore[arg-type]
    q = query[0].transpose(0, 1)
    out, _ = decode_attend(q, up, batch, softmax_scale=scale)
    is_padding = torch.arange(len(q), device=q.device) >= q_starts[-1]
    return out.masked_fill_(is_padding[:, None, None], 0)[None], None


def generate_batch(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`model.generate_batch` of a patched model, with rows as wide as the latents."""
    from transformers import __version__

    if not __version__.startswith(RELEASE):
        raise UnsupportedError(
            f"mlakit: generate_batch needs transformers {RELEASE}x, got {__version__}"
        )
    modules = checks.mla_modules(model)
    checks.check_one_device("mlakit: generate_batch needs", modules)
    for module in modules:
        if pools_keys(module):
            raise UnsupportedError(
                "mlakit: generate_batch does not take models whose indexers pool keys"
            )
        up_projection(module)  # head_dim of some configs is another name of qk_rope_head_dim
    with _latent_rows(model.config):
        return type(model).generate_batch(model, *args, **kwargs)


@contextmanager
def _latent_rows(config: Any) -> Iterator[None]:
    """Give the config one head of latent and rope columns in this scope."""
    fields = {
        "num_key_value_heads": 1,
        "head_dim": config.kv_lora_rank + config.qk_rope_head_dim,
    }
    before = {name: getattr(config, name) for name in fields}
    try:
        for name, value in fields.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
