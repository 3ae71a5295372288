"""Patch a loaded model and undo it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from mlakit.checks import Dims
from mlakit.formats import Format
from mlakit.integrations.transformers import attention, checks, continuous
from mlakit.integrations.transformers.pool import LatentPool

_PATCH = "_mlakit_patch"


@dataclass(frozen=True)
class Patch:
    """What `unpatch` undoes."""

    implementation: str
    hooks: tuple[RemovableHandle, ...]


def patch(model: Any, *, format: Format | None = None, page_size: int = 64) -> None:
    """Run the MLA layers of a transformers model on mlakit, with latents in a paged cache.

    model      a loaded PreTrainedModel of a type with MLA; changed in place, `unpatch` undoes it
    format     of the cached rows; None: the dtype of the weights
    page_size  tokens of a page

    generate() and forward() then work as before. The cache is an ordinary DynamicCache, also one
    that the caller made; its layers share one pool. Padding may be anywhere in a prompt and is not
    stored. Raises UnsupportedError for a model that it cannot run; docs/transformers.md has the
    list.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "patch: needs transformers; pip install 'mlakit[transformers]'"
        ) from error
    checks.check_version(transformers.__version__)
    page_size = Dims("patch").integer("page_size", page_size, 1)
    if _PATCH in model.__dict__:
        raise ValueError("patch: the model is patched already; call unpatch first")
    modules = checks.mla_modules(model)
    checks.check_model(model, modules, format)
    transformers.AttentionInterface.register(attention.NAME, attention.attention)
    transformers.AttentionInterface.register(continuous.PAGED_NAME, continuous.attention)
    transformers.AttentionMaskInterface.register(attention.NAME, attention.mask)
    implementation = model.config._attn_implementation
    model.set_attn_implementation(attention.NAME)
    for module in modules:
        module.__dict__["expand_kv"] = attention.unexpanded
    decoder: nn.Module = model.get_decoder()
    begin = decoder.register_forward_pre_hook(
        _begin_step(decoder, modules, format, page_size), with_kwargs=True
    )
    end = decoder.register_forward_hook(_end_step, always_call=True)
    model.__dict__["generate_batch"] = partial(continuous.generate_batch, model)
    model.__dict__[_PATCH] = Patch(implementation, (begin, end))


def unpatch(model: Any) -> None:
    """Undo `patch`: the model attends as before. Caches that the patched model began are lost."""
    if _PATCH not in model.__dict__:
        raise ValueError("unpatch: the model is not patched")
    undone: Patch = model.__dict__.pop(_PATCH)
    del model.__dict__["generate_batch"]
    for hook in undone.hooks:
        hook.remove()
    for module in checks.mla_modules(model):
        module.__dict__.pop("expand_kv", None)
        attention.forget_up_projection(module)
    model.set_attn_implementation(undone.implementation)


def _begin_step(
    decoder: nn.Module, modules: Sequence[nn.Module], format: Format | None, page_size: int
) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """The hook before the decoder's forward: the rows of the new tokens, once for all layers."""
    from transformers import DynamicCache

    from mlakit.integrations.transformers.cache_layers import pool_of
    from mlakit.integrations.transformers.static_cache import StaticLatentCache

    layers = [int(module.layer_idx) for module in modules]  # type: ignore[arg-type]
    names = tuple(signature(decoder.forward).parameters)

    def begin_step(
        decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        checks.check_inference(decoder, modules)
        config: Any = decoder.config
        if config._attn_implementation == continuous.PAGED_NAME:
            return args, kwargs  # it has a cache of its own
        given = dict(zip(names, args, strict=False)) | kwargs
        if isinstance(given.get("past_key_values"), StaticLatentCache):
            checks.check_no_padding(given.get("attention_mask"))
            return args, kwargs
        mask = checks.check_mask(given.get("attention_mask"))
        x = given.get("input_ids")
        x = given.get("inputs_embeds") if x is None else x
        if x is None:
            raise ValueError("mlakit: input_ids or inputs_embeds must be given")
        cache = given.get("past_key_values")
        use_cache = given.get("use_cache")
        if cache is None and (config.use_cache if use_cache is None else use_cache):
            cache = given["past_key_values"] = DynamicCache(config=config)
        if cache is None:
            pool = attention.uncached.pool = LatentPool(1, None, page_size)
        else:
            pool = pool_of(cache, layers, format, page_size)
        pool.begin_step(x.shape[0], x.shape[1], mask, x.device)
        return (), given

    return begin_step


def _end_step(decoder: nn.Module, args: object, output: object) -> None:
    """The hook after the decoder's forward, also a failed one."""
    attention.uncached.pool = None
