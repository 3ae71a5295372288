"""The cache layers and the step hooks of a patched DeepSeek-V4 model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from mlakit import UnsupportedError
from mlakit.dispatch.checks import values_visible
from mlakit.formats import Format, format_of_dtype
from mlakit.integrations.transformers import checks, v4_attention
from mlakit.integrations.transformers.cache_layers import (
    LatentLayer,
    check_begun,
    check_new,
    known_pools,
)
from mlakit.integrations.transformers.step_hooks import StepHooks
from mlakit.integrations.transformers.v4_pool import V4Pool
from mlakit.model.v4 import V4Config


class V4Layer(LatentLayer):
    """One layer of a pool. The attention function stores the rows, with or without a cache."""

    is_sliding = True
    pool: V4Pool  # type: ignore[assignment]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new rows [batch, 1, length, D], for the attention function."""
        self.is_initialized = True
        return key_states, value_states


class V4StepHooks(StepHooks):
    """`begin` gives the decoder the positions of tokens, whatever padding is between them."""

    def __init__(
        self,
        decoder: nn.Module,
        modules: Sequence[nn.Module],
        format: Format | None,
        page_size: int,
    ) -> None:
        super().__init__(decoder, modules, format, page_size)
        self.config: V4Config = v4_attention.config_of(modules[0])

    def begin(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Reserve the rows of the new tokens, once for all layers."""
        checks.check_inference(decoder, self.modules)
        config: Any = decoder.config
        if config._attn_implementation == checks.PAGED_NAME:
            raise UnsupportedError("mlakit: generate_batch does not run DeepSeek-V4")
        checks.check_implementation(config._attn_implementation)
        given = self._given(args, kwargs)
        mask = checks.check_mask(given.get("attention_mask"))
        x = self._input(given)
        cache = self._cache(given, config)
        devices = {
            layer: checks.device_of(module)
            for layer, module in zip(self.layers, self.modules, strict=True)
        }
        pools = self._new_pools(devices) if cache is None else self._pools_of(cache, devices)
        for pool in pools:
            pool.begin_step(x.shape[0], x.shape[1], mask)
        self._set_positions(given, pools[0], x.shape[:2])
        v4_attention.current.pools = {pool.device: pool for pool in pools}
        v4_attention.current.selected = None
        return (), given

    def end(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        """Commit the step, or drop it if the forward failed."""
        v4_attention.current.pools = {}
        super().end(decoder, args, kwargs, output)

    def _new_pools(self, devices: Mapping[int, torch.device]) -> list[V4Pool]:
        """A pool for the layers of each device."""
        dtype = checks.anchor(self.modules[0]).dtype
        format = format_of_dtype(dtype) if self.format is None else self.format
        checks.check_format("patch: format must be", format, dtype)
        layers: dict[torch.device, list[int]] = {}
        for layer, device in devices.items():
            layers.setdefault(device, []).append(layer)
        return [
            V4Pool(self.config, own, format, self.page_size, device)
            for device, own in layers.items()
        ]

    def _pools_of(self, cache: object, devices: Mapping[int, torch.device]) -> list[V4Pool]:
        """The pools of a cache. An empty DynamicCache gets them: the caller keeps the object."""
        known: list[Any] = known_pools(cache, list(devices))
        if known:
            check_begun(cache, devices)
            return known
        dynamic = check_new(cache)
        pools = self._new_pools(devices)
        by_device = {pool.device: pool for pool in pools}
        number = dict.fromkeys(by_device, 0)
        while len(dynamic.layers) < len(devices):
            dynamic.layers.append(DynamicLayer())
        for layer, device in devices.items():
            before = dynamic.layers[layer]
            if not isinstance(before, DynamicSlidingWindowLayer | DynamicLayer):
                raise ValueError(
                    f"mlakit: layer {layer} of past_key_values must be of DynamicCache(config), "
                    f"got {type(before).__name__}"
                )
            dynamic.layers[layer] = V4Layer(by_device[device], number[device])  # type: ignore[arg-type]
            number[device] += 1
        return pools

    def _set_positions(self, given: dict[str, Any], pool: V4Pool, shape: Sequence[int]) -> None:
        """Positions count tokens, since compressed rows do.

        Others are refused where the host knows them: at once with tensors on the host.
        """
        step = pool.step
        count = shape[0] * shape[1]
        own = step.put(step.tokens.position, count).view(*shape)
        other = given.get("position_ids")
        if isinstance(other, Tensor) and values_visible(other) and values_visible(own):
            columns = other.expand(*shape).flatten()
            if not torch.equal(step.take(columns).to(own.dtype), step.tokens.position):
                raise UnsupportedError(
                    "mlakit: position_ids must count the tokens of each sequence, as generate() "
                    "gives them; packed sequences and other positions are not supported"
                )
        given["position_ids"] = own
