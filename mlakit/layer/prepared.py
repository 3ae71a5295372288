"""The weights that a layer's branches take, made of its parameters and kept until these change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mlakit.dispatch.checks import UnsupportedError
from mlakit.layer.linear import does_more_when_called
from mlakit.ops._refusals import refuse_grad
from mlakit.steps import LayerWeights
from mlakit.steps.weight_copies import WeightCopies, WeightCopy, identity
from mlakit.steps.weights import UpProjection

if TYPE_CHECKING:
    from mlakit.layer.attention import MLAAttention


class PreparedWeights:
    """The `LayerWeights` of one layer on one device.

    They are views of the parameters where the ops can read these, and copies otherwise: an
    up-projection in FP8, a 16-bit one on a CPU, the norm of a model with a latent factor, and sinks
    that are not float32.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._made: LayerWeights | None = None
        self._copies: WeightCopies | None = None

    def of(self, layer: MLAAttention, device: torch.device) -> LayerWeights:
        """The weights, made again after any of them changed. A graph makes them of its inputs."""
        _check_uncalled(layer)
        if torch.compiler.is_compiling():
            return self._make(layer, device)[0]
        linear, norm = layer.kv_b_proj, layer.kv_a_layernorm
        sources = (linear.weight, linear.weight_scale_inv, norm.weight, layer.sinks)
        key = (device, *map(identity, sources))
        if self._made is None or self._key != key:
            # not inference tensors: they could not be refreshed outside of inference mode
            with torch.inference_mode(False), torch.no_grad():
                self._made, copies = self._make(layer, device)
            self._copies = WeightCopies("MLAAttention", copies) if copies else None
            self._key = key
        if self._copies is not None:
            refuse_grad(
                "MLAAttention", **{"kv_a_layernorm.weight": norm.weight, "sinks": layer.sinks}
            )
            self._copies.ensure_current()
        return self._made

    def refresh(self) -> None:
        """Make the copies again, where they are: CUDA graphs read them there."""
        if self._made is not None:
            self._made.up.refresh_weights()
        if self._copies is not None:
            self._copies.refresh()

    def _make(
        self, layer: MLAAttention, device: torch.device
    ) -> tuple[LayerWeights, list[WeightCopy]]:
        c, norm = layer.config, layer.kv_a_layernorm
        linear = layer.kv_b_proj
        gamma: Tensor = norm.weight
        sinks: Tensor | None = layer.sinks
        copies: list[WeightCopy] = []

        def copied(name: str, weight: Tensor, factor: float = 1.0) -> Tensor:
            copies.append(WeightCopy(name, weight.detach(), dtype=torch.float32, factor=factor))
            return copies[-1].values

        if c.latent_factor != 1.0:  # float32: a rounded product would scale the whole cache
            gamma = copied("kv_a_layernorm.weight", gamma, c.latent_factor)
        if sinks is not None and sinks.dtype != torch.float32:
            sinks = copied("sinks", sinks)
        made = LayerWeights(
            UpProjection.from_checkpoint(linear.weight, c.geometry, linear.weight_scale_inv),
            gamma,
            layer.rope_table.on(device),
            c.scale * c.q_factor,  # the query enters the scores only
            epsilon=norm.epsilon,
            rope=c.geometry.rope,
            sink=sinks,
        )
        return made, copies


def _check_uncalled(layer: MLAAttention) -> None:
    """The ops take the weights of these modules: what else a call of them computes is left out."""
    for name in ("kv_b_proj", "kv_a_layernorm"):
        if does_more_when_called(getattr(layer, name)):
            raise UnsupportedError(
                f"MLAAttention: {name} must have no forward hooks and no forward of its own, "
                "because the layer takes its weight and does not call it"
            )
    if layer.kv_b_proj.bias is not None:
        raise UnsupportedError("MLAAttention: kv_b_proj must have no bias")
