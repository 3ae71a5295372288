"""The attention function and the mask function that a patched model calls."""

from __future__ import annotations

from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from mlakit import (
    MLAGeometry,
    UnsupportedError,
    UpProjection,
    decode_attend,
    physical_rows,
    prefill_attend,
)
from mlakit.integrations.transformers import checks, v4_attention
from mlakit.integrations.transformers.pool import LatentPool
from mlakit.integrations.transformers.selected_columns import (
    SelectedColumns,
    pools_keys,
    selects_all,
)
from mlakit.model.releases import DEEPSEEK_V4
from mlakit.steps.step import DECODE_THRESHOLD
from mlakit.steps.weight_copies import identity

_UP_PROJECTION = "_mlakit_up_projection"


class _Uncached(local):
    """The pools of a forward without a cache, by device, one set per thread.

    All layers on a device use the only layer of its pool.
    """

    def __init__(self) -> None:
        self.pools: dict[torch.device, LatentPool] = {}


uncached = _Uncached()


def unexpanded(latent: Any, k_rope: Tensor) -> tuple[Any, Tensor]:
    """`expand_kv` of a patched module: the attention function takes the latents."""
    return latent, k_rope


def attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Tensor,
    attention_mask: Tensor | SelectedColumns | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of the new tokens over the pool, as an attention function of transformers.

    query    [batch, heads, length, D_N + D_R], rotated
    key      (pool, layer) with a cache; latents [batch, 1, length, D_C] without
    value    rotated keys [batch, 1, length, D_R]
    attention_mask  the columns that an indexer selected, or a mask, which is not used: the
             sequences hold no padding
    indices  [batch, length, topk] columns that an indexer selected; they may name padding and
             columns after the query's, and -1, which is no column
    s_aux    [heads] sinks

    Returns [batch, length, heads, D_V]; 0 for padding.
    """
    if v4_attention.is_v4(module):
        given = others | {"attention_mask": attention_mask, "indices": indices}
        return v4_attention.attention(module, query, key, scaling, dropout, given), None
    checks.check_patched(module)
    checks.check_attention_arguments(module, dropout, others)
    if isinstance(attention_mask, SelectedColumns):
        indices = attention_mask.indices
    if not isinstance(key, (Tensor, tuple)):
        return _static_attention(module, query, key, scaling, indices, s_aux), None
    if isinstance(key, Tensor):
        found, layer = uncached.pools.get(checks.device_of(module)), 0
        if found is None:
            raise UnsupportedError("mlakit: the decoder of the patched model must be called")
        pool = found
        pool.write(layer, key, value)
    else:
        pool, layer = key
    step = pool.step
    batch, heads, length, _ = query.shape
    q = step.take(query.transpose(1, 2).flatten(0, 1))
    has_all = not pools_keys(module) or (selects_all(module) and not step.is_padded)
    rows = None if indices is None else _selected_rows(pool, indices, has_all)
    up = up_projection(module)
    cached = pool.batch(layer)
    scale = float(module.scaling if scaling is None else scaling)  # type: ignore[arg-type]
    sink = None if s_aux is None else s_aux.float()
    how: dict[str, Any] = {"softmax_scale": scale, "sink": sink}
    if rows is not None:
        out, _ = decode_attend(q, up, cached, rows=rows, **how)
    elif max(step.context.q_lens) > DECODE_THRESHOLD:
        out, _ = prefill_attend(q, up, cached, plan=step.context, **how)
    else:
        out, _ = decode_attend(q, up, cached, plan=pool.decode_plan(heads, q.dtype), **how)
    return step.put(out, batch * length).view(batch, length, heads, -1), None


def _static_attention(
    module: nn.Module,
    query: Tensor,
    layer: Any,
    scaling: float | None,
    indices: Tensor | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention over a `StaticLatentLayer`, without a look at lengths: absorbed for any step."""
    batch, heads, length, _ = query.shape
    q = query.transpose(1, 2).flatten(0, 1)
    scale = float(module.scaling if scaling is None else scaling)  # type: ignore[arg-type]
    sink = None if s_aux is None else s_aux.float()
    cached = layer.batch(length)
    rows = None if indices is None else layer.rows(indices)
    up = up_projection(module, layer.geometry)
    out, _ = decode_attend(q, up, cached, softmax_scale=scale, sink=sink, rows=rows)
    marked: Tensor = layer.mark_lost(out.view(batch, length, heads, -1))
    return marked


def _selected_rows(pool: LatentPool, indices: Tensor, has_all: bool) -> Tensor | None:
    """The rows [tokens, topk] of selected columns; None where every visible token is selected.

    has_all  where as many columns are selected as there are tokens, every visible one is selected
    """
    step = pool.step
    if has_all and indices.shape[-1] >= max(step.context.kv_lens):
        return None
    columns = step.take(indices.flatten(0, 1)).long()
    tokens = step.positions[step.request[:, None], columns]
    tokens = tokens.masked_fill((columns < 0) | (tokens > step.position[:, None]), -1)
    return physical_rows(tokens, step.page_table, pool.allocator.page_size, step.q_starts)


class _Known:
    """The up-projection that was made of a module's weight, and the identity of that weight.

    A copied or unpickled module has another weight and makes its own.
    """

    def __init__(self) -> None:
        self.identity: tuple[object, ...] | None = None
        self.up: UpProjection | None = None

    def __reduce__(self) -> tuple[type[_Known], tuple[()]]:
        return _Known, ()


def up_projection(module: nn.Module, geometry: MLAGeometry | None = None) -> UpProjection:
    """W_UK and W_UV of a module, made again when its weight is another or was written.

    geometry  of the whole model; None: the one that was used before, or that of the config

    A graph of torch.compile has them as views of the module's weight, whichever that is then.
    """
    weight = checks.kv_b_proj(module)
    if torch.compiler.is_compiling() and geometry is not None:
        return _made(weight, geometry)
    known: _Known = module.__dict__.setdefault(_UP_PROJECTION, _Known())
    if geometry is None:  # generate_batch changes the config while it runs
        config: Any = module.config
        geometry = MLAGeometry.from_config(config) if known.up is None else known.up.geometry
    if torch.compiler.is_compiling():
        return _made(weight, geometry)
    found = (identity(weight.matrix), identity(weight.scale))
    if known.up is None or known.identity != found:
        # not inference tensors: they could not be refreshed outside of inference mode
        with torch.inference_mode(False), torch.no_grad():
            known.identity, known.up = found, _made(weight, geometry)
    return known.up


def _made(weight: checks.UpWeight, geometry: MLAGeometry) -> UpProjection:
    heads = weight.matrix.shape[0] // (geometry.qk_nope_head_dim + geometry.v_head_dim)
    return UpProjection.from_checkpoint(weight.matrix, geometry.with_heads(heads), weight.scale)


def forget_up_projection(module: nn.Module) -> None:
    module.__dict__.pop(_UP_PROJECTION, None)


def mask(*args: Any, config: Any = None, **arguments: Any) -> Tensor | None:
    """The mask of a forward: that of padding for dense models, whose lengths say the rest.

    A sparse model passes it to its indexer. That mask is additive and always made: the indexers of
    transformers 5.15 and 5.16 add it to their scores, where a boolean one counts as 0 and 1.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if getattr(config, "model_type", None) == DEEPSEEK_V4:  # every window is that of the config
        return None
    if arguments.get("mask_function", causal_mask_function) is not causal_mask_function:
        raise UnsupportedError(
            "mlakit: the mask must be causal; packed sequences and other masks are not supported"
        )
    if getattr(config, "index_topk", None) is None:
        return arguments.get("attention_mask")
    dtype = arguments.pop("dtype", torch.float32)
    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    visible: Tensor = sdpa_mask(*args, config=config, **arguments)
    # eager_mask copies a scalar from the host, which a CUDA graph cannot capture
    made = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return made.masked_fill_(~visible, torch.finfo(dtype).min)
