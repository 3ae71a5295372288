"""Refusals of a patched model: each is raised before the model would give a wrong result."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mlakit import UnsupportedError
from mlakit.dispatch.checks import E4M3, FLOATS, refuse_tangent
from mlakit.formats import FLOAT_FORMATS, known_format
from mlakit.layer.linear import does_more_when_called, is_offloaded
from mlakit.steps.weights import BLOCK

# of the attention function: "mlakit", or the name of a copy that was loaded from the Hub
NAME = __name__.partition(".")[0]
PAGED_NAME = f"paged|{NAME}"
_SHARED_CONFIG = (
    "the model must not share its config object with a patched model; give each model its own, "
    "copy.deepcopy(config)"
)
FP8_LINEAR = ("transformers.integrations.finegrained_fp8", "FP8Linear")
OLDEST = (5, 15)  # the first release that caches latents and has expand_kv
NEWEST_TESTED = (5, 23)
# arguments that reach an attention function and do not change what it computes
HARMLESS = frozenset(
    {
        "cache_position",
        "cache_params",
        "is_causal",  # checked apart
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class LatentAttention:
    """The base of the attention classes that attend over latents without `patch`."""


def check_version(version: str) -> None:
    """Refuse releases without `expand_kv`; warn of those that were not tested."""
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UnsupportedError(f"patch: needs transformers {oldest} or newer, got {version}")
    if release > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        warnings.warn(
            f"patch: tested with transformers up to {newest}, got {version}", stacklevel=4
        )


def mla_modules(model: nn.Module) -> list[nn.Module]:
    """The attention modules with `expand_kv`, in the order of their layers."""
    found = [
        module
        for module in model.modules()
        if hasattr(type(module), "expand_kv") and hasattr(module, "kv_b_proj")
    ]
    return sorted(found, key=lambda module: int(module.layer_idx))  # type: ignore[arg-type]


def check_model(model: nn.Module, modules: Sequence[nn.Module], format: str | None) -> None:
    """The model has MLA layers whose weights the ops take, and `format` stores their latents."""
    if not modules:
        raise UnsupportedError(
            f"patch: {type(model).__name__} has no MLA attention (a module with expand_kv)"
        )
    offloaded = sum(is_offloaded(module.kv_b_proj) for module in modules)
    if offloaded:
        raise UnsupportedError(
            f"patch: no layer may be offloaded, got {offloaded} of {len(modules)}; load the model "
            "with a device_map without cpu and disk"
        )
    dtypes = [kv_b_proj(module).dtype for module in modules]  # refuses what it cannot multiply by
    check_format("patch: format must be", format, dtypes[0])


def check_one_device(must: str, modules: Sequence[nn.Module]) -> None:
    """All layers are on one device.

    must  the beginning of the error, such as "StaticLatentCache: model must have"
    """
    devices = sorted({str(device_of(module)) for module in modules})
    if len(devices) > 1:
        raise UnsupportedError(f"{must} all layers on one device, got {', '.join(devices)}")


def check_format(must: str, format: str | None, dtype: torch.dtype) -> None:
    """Rows of `format` go with weights of this dtype; None: the weights decide.

    must  the beginning of the error, such as "patch: format must be"
    """
    if format is None:
        return
    known = known_format(format)
    if known in FLOAT_FORMATS.values() and known != FLOAT_FORMATS[dtype]:
        own = f"{FLOAT_FORMATS[dtype]!r} or an FP8 format"
        raise UnsupportedError(f"{must} {own} for weights of {_name(dtype)}, got {format!r}")


def check_own_config(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """The config, which names the attention function, is not that of a patched model."""
    if model.config._attn_implementation == NAME and isinstance(modules[0], LatentAttention):  # type: ignore[union-attr]
        raise ValueError("patch: the model was made with mlakit's attention; it needs no patch")
    for config in (model.config, modules[0].config):
        if config._attn_implementation == NAME:  # type: ignore[union-attr]
            raise UnsupportedError(f"patch: {_SHARED_CONFIG}")


def check_patched(module: nn.Module) -> None:
    """The module's model is patched, not only one that has the same config object."""
    if "expand_kv" not in module.__dict__ and not isinstance(module, LatentAttention):
        raise UnsupportedError(f"mlakit: {_SHARED_CONFIG}")


def check_implementation(found: str | None) -> None:
    """The config of a patched model still names the attention function of the patch."""
    if found not in (NAME, PAGED_NAME):
        raise UnsupportedError(
            f"mlakit: the attention implementation of a patched model must be {NAME!r}, got "
            f"{found!r}; call unpatch(model) before model.set_attn_implementation"
        )


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's weights, which is where its latents are cached."""
    return anchor(module).device


def anchor(module: Any) -> Tensor:
    """The weight of an attention module that stands for its device and its dtype."""
    linear = module.kv_b_proj if hasattr(module, "kv_b_proj") else module.o_a_proj
    weight: Tensor = linear.weight
    return weight


class UpWeight(NamedTuple):
    """The up-projection of this rank's heads, not a parameter.

    scale  [ceil(rows / 128), ceil(columns / 128)] float32 of an e4m3 matrix, else None
    dtype  of the latents that it multiplies
    """

    matrix: Tensor
    scale: Tensor | None
    dtype: torch.dtype


def kv_b_proj(module: nn.Module) -> UpWeight:
    """The up-projection of a module: a plain float matrix, or e4m3 with a scale per block."""
    linear: Any = module.kv_b_proj
    is_fp8 = (type(linear).__module__, type(linear).__name__) == FP8_LINEAR
    if type(linear) is not nn.Linear and not is_fp8:
        # adapters and other quantised layers compute something else than x @ weight.T
        raise UnsupportedError(
            "mlakit: kv_b_proj must be nn.Linear or the FP8Linear of transformers, "
            f"got {type(linear).__name__}"
        )
    if linear.bias is not None:
        raise UnsupportedError("mlakit: kv_b_proj must have no bias")
    if does_more_when_called(linear):
        raise UnsupportedError(
            "mlakit: kv_b_proj must have no forward hooks and no forward of its own, because the "
            "attention multiplies by its weight and does not call it; remove them, or call unpatch"
        )
    if not torch.compiler.is_compiling():
        refuse_tangent("mlakit", "kv_b_proj", linear.weight)  # `detach` would drop it
    weight = _local(linear.weight)
    if is_fp8 and weight.dtype == E4M3:
        scale = _local(linear.weight_scale_inv)
        if tuple(linear.block_size or ()) != (BLOCK, BLOCK) or scale.dtype != torch.float32:
            raise UnsupportedError(
                f"mlakit: kv_b_proj in FP8 must have a float32 scale per {BLOCK} x {BLOCK} block, "
                f"got scales of {_name(scale.dtype)} and block_size {linear.block_size}"
            )
        norm: Any = module.kv_a_layernorm
        return UpWeight(weight, scale, norm.weight.dtype)
    if type(weight) is not Tensor or weight.dtype not in FLOATS:
        got = f"{type(weight).__name__} of {_name(weight.dtype)}"
        raise UnsupportedError(
            f"mlakit: kv_b_proj must not be quantised, a matrix of {', '.join(map(_name, FLOATS))},"
            f" got {got}"
        )
    return UpWeight(weight, None, weight.dtype)


def _local(parameter: Any) -> Any:
    """Return the values of a parameter; those of this rank where it is sharded."""
    values = parameter.detach()
    return values.to_local() if hasattr(values, "to_local") else values


def check_inference(decoder: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Refuse training and gradients: there is no backward."""
    if decoder.training:
        raise UnsupportedError("mlakit: the model must not be in training mode; call model.eval()")
    if torch.is_grad_enabled() and any(anchor(module).requires_grad for module in modules):
        raise UnsupportedError(
            "mlakit: there is no backward; call the model under torch.no_grad() or "
            "torch.inference_mode(), or model.requires_grad_(False)"
        )


def check_mask(mask: object) -> Tensor | None:
    """A mask of padding, [batch, columns], or none."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        got = f"{mask.ndim} axes" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mlakit: attention_mask must have axes (batch, columns), got {got}")
    return mask


def check_no_padding(mask: object, max_length: int) -> None:
    """Require no mask, or one of ones, for a cache of fixed size. A graph takes no mask."""
    if mask is None:
        return
    known = check_mask(mask)
    if known is not None and known.shape[1] > max_length:
        raise ValueError(
            f"StaticLatentCache: attention_mask must have at most {max_length} columns, the "
            f"tokens that the cache has memory for, got {known.shape[1]}"
        )
    if torch.compiler.is_compiling() or known is None or not bool(known.all()):
        raise ValueError(
            "mlakit: attention_mask must be None with a StaticLatentCache, which has no padding"
        )


def check_attention_arguments(module: nn.Module, dropout: float, others: Mapping[str, Any]) -> None:
    """Refuse what the ops do not compute, by name."""
    if dropout or module.training:
        raise UnsupportedError("mlakit: training and dropout are not supported")
    if others.get("is_causal") is False:
        raise UnsupportedError("mlakit: is_causal must not be False")
    for name, value in others.items():
        if name not in HARMLESS and value is not None and value is not False:
            raise UnsupportedError(f"mlakit: {name} is not supported by the patched attention")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
