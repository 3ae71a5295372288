"""A layer from an attention module of transformers, sharing its parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from torch import nn

from mlakit.dispatch.checks import E4M3, FLOATS, Dims, UnsupportedError
from mlakit.layer.attention import MLAAttention
from mlakit.layer.config import LayerConfig
from mlakit.layer.linear import SCALE, does_more_when_called

# names of the projection of the output's gate
GATES = ("gate_proj", "g_proj", "output_gate_proj")

Layer = TypeVar("Layer", bound=MLAAttention)


def layer_of(cls: type[Layer], module: nn.Module, max_positions: int | None) -> Layer:
    """The layer of `module`: its config, scale and parameters."""
    if not hasattr(module, "kv_b_proj") or not hasattr(module, "config"):
        name = type(module).__name__
        raise TypeError(f"from_hf: module must be an MLA attention of transformers, got {name}")
    check_calls(module)
    config = _config_of(module)
    layer = cls(config, max_positions=max_positions, device="meta")
    put_parameters(layer, module)
    return layer


def put_parameters(layer: nn.Module, module: nn.Module) -> None:
    """Put the parameters of a module in the places of a layer's own, which have the same names."""
    given = dict(module.named_parameters())
    missing = set(dict(layer.named_parameters())) - set(given)
    if missing:
        raise ValueError(f"from_hf: {type(module).__name__} has no {', '.join(sorted(missing))}")
    for name, parameter in given.items():
        _put(layer, name, parameter, type(module).__name__)


def check_calls(module: nn.Module, *, linear: str = "Linear") -> None:
    """What the module computes follows from its config and its parameters.

    linear  name of a subclass of nn.Linear that the layer knows
    """
    for name, part in module.named_modules():
        if does_more_when_called(part):
            raise UnsupportedError(
                f"from_hf: {name or 'module'} must have no forward hooks and no forward of its "
                "own, because the layer takes its parameters and does not call it"
            )
        kind = type(part)
        known = kind is nn.Linear or kind.__name__ == linear or hasattr(part, SCALE)
        if issubclass(kind, nn.Linear) and not known:
            raise UnsupportedError(f"from_hf: {name} must be nn.Linear, got {kind.__name__}")


def _config_of(module: nn.Module) -> LayerConfig:
    config = LayerConfig.from_config(module.config, getattr(module, "layer_idx", None) or 0)
    g = config.geometry
    rows = module.kv_b_proj.weight.shape[0]  # type: ignore[union-attr, index]
    # a tensor-parallel rank has some of the heads
    heads = int(rows) // (g.qk_nope_head_dim + g.v_head_dim)
    norm = getattr(module, "kv_a_layernorm", None)
    has_indexer = getattr(module, "indexer", None) is not None
    selection = config.selection and ("own" if has_indexer else "shared")
    return replace(
        config.with_heads(heads),
        softmax_scale=getattr(module, "scaling", None),
        epsilon=getattr(norm, "variance_epsilon", config.epsilon),
        q_factor=getattr(module, "mla_scale_q_lora", config.q_factor),
        latent_factor=getattr(module, "mla_scale_kv_lora", config.latent_factor),
        selection=selection,
        gate=next((name for name in GATES if hasattr(module, name)), None),
    )


def _put(layer: nn.Module, name: str, parameter: nn.Parameter, source: str) -> None:
    """Put a parameter of the module in the place of the layer's own."""
    path, _, own = name.rpartition(".")
    try:
        owner = layer.get_submodule(path)
    except AttributeError:
        owner = None
    if owner is None or own not in owner._parameters:
        raise ValueError(f"from_hf: {source} has a parameter that no MLA layer has, {name}")
    known = owner._parameters[own]
    if known is not None and known.shape != parameter.shape:
        shapes = f"{tuple(known.shape)}, got {tuple(parameter.shape)}"
        raise ValueError(f"from_hf: {name} of {source} must have shape {shapes}")
    takes_fp8 = own == "weight" and SCALE in owner._parameters
    dtypes = (*FLOATS, E4M3) if takes_fp8 else FLOATS
    Dims("from_hf").dtype(f"{name} of {source}", parameter, *dtypes)
    owner._parameters[own] = parameter
