"""DeepSeek-V4 in a patched model: the attention function, and the forward of its compressors.

The model projects, norms and rotates; its compressors get a forward that pools windows into the
pool and selects rows there, and returns no rows to the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from mlakit import UnsupportedError
from mlakit.integrations.transformers import checks
from mlakit.integrations.transformers.v4_pool import V4Pool
from mlakit.layer.linear import does_more_when_called, is_offloaded
from mlakit.layer.v4.attention import rope_table_for
from mlakit.layer.v4.batch import Pooling
from mlakit.layer.v4.compressor import select_rows
from mlakit.model.v4 import CSA, V4Config

_PATCHED = "_mlakit_v4"


class _Current(local):
    """The pools of the forward that runs in this thread, by device, and what it selected."""

    def __init__(self) -> None:
        self.pools: dict[torch.device, V4Pool] = {}
        self.selected: Tensor | None = None


current = _Current()


def is_v4(module: nn.Module) -> bool:
    """Whether a module is an attention layer of DeepSeek-V4."""
    return hasattr(module, "sinks") and hasattr(module, "o_a_proj")


def v4_modules(model: nn.Module) -> list[nn.Module]:
    """The attention modules of DeepSeek-V4, in the order of their layers."""
    found = [module for module in model.modules() if is_v4(module)]
    return sorted(found, key=lambda module: int(module.layer_idx))  # type: ignore[arg-type]


def hand_over(module: nn.Module) -> None:
    """Have a module attend over a pool, while it is patched."""
    module.__dict__[_PATCHED] = True
    compressor: Any = module.compressor
    if compressor is not None:
        compressor.__dict__["forward"] = partial(_compress, compressor)


def undo(module: nn.Module) -> None:
    """Have a module attend as before."""
    module.__dict__.pop(_PATCHED, None)
    getattr(module.compressor, "__dict__", {}).pop("forward", None)


def check_model(modules: Sequence[Any], format: str | None) -> None:
    """The weights are there and plain, and `format` stores rows of their dtype."""
    offloaded = sum(is_offloaded(module.o_a_proj) for module in modules)
    if offloaded:
        raise UnsupportedError(
            f"patch: no layer may be offloaded, got {offloaded} of {len(modules)}; load the model "
            "with a device_map without cpu and disk"
        )
    checks.check_format("patch: format must be", format, checks.anchor(modules[0]).dtype)
    for module in modules:
        _check_module(module)


def refuse_generate_batch(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """`generate_batch` of a patched model."""
    raise UnsupportedError(
        f"mlakit: generate_batch does not run {type(model).__name__}, whose rows are compressed"
    )


def _check_module(module: Any) -> None:
    """The weights that are used without a call of their module are plain ones."""
    parts: dict[str, nn.Module] = {}
    compressor = module.compressor
    if compressor is not None:
        parts |= {"compressor.kv_norm": compressor.kv_norm, "compressor": compressor}
        indexer = getattr(compressor, "indexer", None)
        if indexer is not None:
            parts |= {
                "compressor.indexer": indexer,
                "compressor.indexer.kv_norm": indexer.kv_norm,
                "compressor.indexer.scorer": indexer.scorer,
            }
            rows = indexer.num_heads * indexer.head_dim
            if indexer.q_b_proj.out_features != rows or _is_sharded(indexer.q_b_proj.weight):
                raise UnsupportedError(
                    "patch: the indexer of DeepSeek-V4 must have all heads on each rank; tensor "
                    "parallelism of its heads is not supported"
                )
    for name, part in parts.items():
        if does_more_when_called(part):
            raise UnsupportedError(
                f"patch: {name} must have no forward hooks and no forward of its own, because the "
                "patched model takes its weights and does not call it"
            )


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    scaling: float | None,
    dropout: float,
    others: Mapping[str, Any],
) -> Tensor:
    """Attention of the new tokens over their windows and compressed rows.

    query  [batch, heads, length, D], rotated
    key    [batch, 1, length, D], the new rows

    Returns [batch, length, heads, D]; 0 for padding.
    """
    if _PATCHED not in module.__dict__:
        raise UnsupportedError(
            "mlakit: a model of DeepSeek-V4 must be patched, and have a config of its own; call "
            "patch(model)"
        )
    window = others.get("sliding_window")
    known = {name: value for name, value in others.items() if name not in ("sliding_window",)}
    checks.check_attention_arguments(module, dropout, known)
    pool = _pool_of(module)
    config = pool.cache.config
    if window is not None and window != config.sliding_window:
        must = f"be that of the config, {config.sliding_window}"
        raise UnsupportedError(f"mlakit: sliding_window must {must}, got {window}")
    layer, step = int(module.layer_idx), pool.step
    batch, heads, length, width = query.shape
    q = step.take(query.transpose(1, 2).reshape(batch * length, heads, width))
    step.tokens.write_window(layer, step.take(key[:, 0].flatten(0, 1)))
    selected, current.selected = current.selected, None
    scale = float(module.scaling if scaling is None else scaling)
    sink = module.sinks.detach().float()
    out = step.tokens.attend(layer, q, sink, scale, selected)
    return step.put(out, batch * length).view(batch, length, heads, width)


def _pool_of(module: nn.Module) -> V4Pool:
    return _pool_on(checks.device_of(module))


def _pool_on(device: torch.device) -> V4Pool:
    found = current.pools.get(device)
    if found is None:
        raise UnsupportedError("mlakit: the decoder of the patched model must be called")
    return found


def _compress(
    compressor: Any,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    past_key_values: Any,
    layer_idx: int,
) -> tuple[Tensor, None]:
    """The forward of a compressor: its rows go into the pool, and none are returned."""
    found = _pool_on(hidden_states.device)
    step, config = found.step, found.cache.config
    tokens = step.tokens
    kind = config.kinds[layer_idx]
    x = step.take(hidden_states.flatten(0, 1))
    rope = rope_table_for(config, kind, tokens.max_length)
    freqs = rope.on(x.device)
    tokens.compress(layer_idx, *_projected(compressor, x), _pooling(compressor, freqs))
    if kind == CSA:
        indexer = compressor.indexer
        pooling = _pooling(indexer, freqs)
        tokens.compress(layer_idx, *_projected(indexer, x), pooling, "index")
        residual = step.take(q_residual.flatten(0, 1))
        q = indexer.q_b_proj(residual).unflatten(-1, (-1, indexer.head_dim))
        columns = config.qk_rope_head_dim
        rope.rotate(q[..., -columns:], tokens.position, "interleaved")
        weights = indexer.scorer.weights_proj(x)
        current.selected = select_rows(tokens, layer_idx, q, weights, backend="auto")
    return hidden_states.new_zeros(len(hidden_states), 1, 0, compressor.head_dim), None


def _projected(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return module.kv_proj(x), module.gate_proj(x)


def _pooling(module: Any, freqs: Tensor) -> Pooling:
    norm = module.kv_norm
    return Pooling(
        module.position_bias.detach(), norm.weight.detach(), freqs, float(norm.variance_epsilon)
    )


def config_of(module: Any) -> V4Config:
    """The attention of a module's model."""
    return V4Config.from_config(module.config)


def _is_sharded(weight: Tensor) -> bool:
    return hasattr(weight, "to_local")
