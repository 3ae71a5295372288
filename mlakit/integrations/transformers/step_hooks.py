"""The hooks on the decoder of a patched model: they begin a step and commit it."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import DynamicCache

from mlakit.formats import Format
from mlakit.integrations.transformers import attention, checks, continuous
from mlakit.integrations.transformers.cache_layers import known_pools, pools_of
from mlakit.integrations.transformers.pool import LatentPool
from mlakit.integrations.transformers.static_cache import StaticLatentCache


def register_attention() -> None:
    """Make the attention functions known to transformers, by name."""
    transformers.AttentionInterface.register(checks.NAME, attention.attention)
    transformers.AttentionInterface.register(checks.PAGED_NAME, continuous.attention)
    transformers.AttentionMaskInterface.register(checks.NAME, attention.mask)


class StepHooks:
    """`begin` before the decoder's forward, `end` after it, also after one that failed.

    An object with methods, unlike a closure, is pickled and copied together with its model.
    """

    def __init__(
        self,
        decoder: nn.Module,
        modules: Sequence[nn.Module],
        format: Format | None,
        page_size: int,
    ) -> None:
        self.modules, self.format, self.page_size = tuple(modules), format, page_size
        self.layers = [int(module.layer_idx) for module in modules]  # type: ignore[arg-type]
        self.names = tuple(signature(decoder.forward).parameters)

    def __setstate__(self, state: dict[str, Any]) -> None:
        register_attention()  # the process that unpickles a model may not have patched any
        self.__dict__.update(state)

    def begin(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Reserve the rows of the new tokens, once for all layers."""
        checks.check_inference(decoder, self.modules)
        config: Any = decoder.config
        checks.check_implementation(config._attn_implementation)
        if config._attn_implementation == checks.PAGED_NAME:
            return args, kwargs  # it has a cache of its own
        given = self._given(args, kwargs)
        cache = given.get("past_key_values")
        if isinstance(cache, StaticLatentCache):
            self._check_static(cache, given.get("attention_mask"))
            return args, kwargs
        mask = checks.check_mask(given.get("attention_mask"))
        x = self._input(given)
        cache = self._cache(given, config)
        devices = [checks.device_of(module) for module in self.modules]
        if cache is None:
            pools = [LatentPool(1, None, self.page_size, each) for each in dict.fromkeys(devices)]
            attention.uncached.pools = {pool.device: pool for pool in pools}
        else:
            layers = dict(zip(self.layers, devices, strict=True))
            pools = pools_of(cache, layers, self.format, self.page_size)
            stored = pools[0].cache
            check_rows(self.modules[0], self.format, None if stored is None else stored.format)
        for pool in pools:
            pool.begin_step(x.shape[0], x.shape[1], mask)
        return (), given

    def end(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        """Commit the step, or drop it if the forward failed.

        Torch does not call a hook after a KeyboardInterrupt. The pool drops that step later.
        """
        attention.uncached.pools = {}
        for pool in known_pools(self._given(args, kwargs).get("past_key_values"), self.layers):
            if output is None:
                pool.roll_back()
            else:
                pool.commit()

    def _input(self, given: dict[str, Any]) -> Tensor:
        """The new tokens, [batch, length] or [batch, length, hidden]."""
        ids = given.get("input_ids")
        x: Tensor | None = given.get("inputs_embeds") if ids is None else ids
        if x is None:
            raise ValueError("mlakit: input_ids or inputs_embeds must be given")
        return x

    def _cache(self, given: dict[str, Any], config: Any) -> Any:
        """The cache of the forward: a new one where none is given and one is wanted."""
        cache, use_cache = given.get("past_key_values"), given.get("use_cache")
        if cache is None and (config.use_cache if use_cache is None else use_cache):
            cache = given["past_key_values"] = DynamicCache(config=config)
        return cache

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self.names, args, strict=False)) | kwargs

    def _check_static(self, cache: StaticLatentCache, mask: object) -> None:
        checks.check_no_padding(mask, cache.get_max_length())
        check_rows(self.modules[0], self.format, cache.format)


def check_rows(module: nn.Module, format: Format | None, stored: str | None) -> None:
    """The weights may have got another dtype since the patch or since the cache began."""
    dtype = checks.kv_b_proj(module).dtype
    checks.check_format("patch: format must be", format, dtype)
    checks.check_format("mlakit: past_key_values must have rows of", stored, dtype)
