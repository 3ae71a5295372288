"""A layer of DeepSeek-V4 from a module of transformers, sharing its parameters."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from mlakit.layer.from_hf import check_calls, put_parameters
from mlakit.layer.v4.attention import V4Attention
from mlakit.model.v4 import V4Config

Layer = TypeVar("Layer", bound=V4Attention)
GROUPED = "DeepseekV4GroupedLinear"


def v4_layer_of(cls: type[Layer], module: nn.Module) -> Layer:
    """The layer of `module`: its config and parameters."""
    if not hasattr(module, "sinks") or not hasattr(module, "o_a_proj"):
        name = type(module).__name__
        raise TypeError(f"from_hf: module must be a DeepseekV4Attention, got {name}")
    check_calls(module, linear=GROUPED)
    config = V4Config.from_config(module.config)
    layer = cls(config, module.layer_idx, device="meta")  # type: ignore[arg-type]
    put_parameters(layer, module)
    return layer
