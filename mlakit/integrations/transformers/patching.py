"""Patch a loaded model and undo it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from mlakit.dispatch.checks import Dims
from mlakit.formats import Format
from mlakit.integrations.transformers import (
    attention,
    checks,
    continuous,
    selected_columns,
    v4_attention,
)

_PATCH = "_mlakit_patch"


@dataclass(frozen=True)
class Patch:
    """The changes to a model that `unpatch` undoes."""

    implementation: str
    hooks: tuple[RemovableHandle, ...]


class Patched:
    """`patch` returns this: `with patch(model):` undoes the patch at the end of the block."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> Any:
        """Return the model."""
        return self.model

    def __exit__(self, *error: object) -> None:
        if _PATCH in self.model.__dict__:  # it may have been undone in the block
            unpatch(self.model)


def patch(model: Any, *, format: Format | None = None, page_size: int = 64) -> Patched:
    """Run the MLA layers of a transformers model on mlakit, with latents in a paged cache.

    model      a loaded PreTrainedModel of a type with MLA; changed in place, `unpatch` undoes it
    format     of the cached rows; None: the dtype of the weights
    page_size  tokens of a page

    generate() and forward() then work as before. The cache is an ordinary DynamicCache, also one
    that the caller made; its layers on a device share a pool. Padding may be anywhere in a prompt
    and is not stored. Raises UnsupportedError for a model that it cannot run; docs/transformers.md
    has the list. A `with` block around the call undoes the patch at its end.
    """
    _check_transformers("patch")
    page_size = Dims("patch").integer("page_size", page_size, 1)
    if _PATCH in model.__dict__:
        raise ValueError("patch: the model is patched already; call unpatch first")
    v4 = v4_attention.v4_modules(model)
    modules = v4 or checks.mla_modules(model)
    if v4:
        v4_attention.check_model(v4, format)
    else:
        checks.check_model(model, modules, format)
    checks.check_own_config(model, modules)
    from mlakit.integrations.transformers.step_hooks import StepHooks, register_attention
    from mlakit.integrations.transformers.v4_hooks import V4StepHooks

    register_attention()
    implementation = model.config._attn_implementation
    _set_implementation(model, checks.NAME)
    for module in v4:
        v4_attention.hand_over(module)
    for module in () if v4 else modules:
        module.__dict__["expand_kv"] = attention.unexpanded
        selected_columns.hand_over(module)
    decoder: nn.Module = model.get_decoder()
    hooks = (V4StepHooks if v4 else StepHooks)(decoder, modules, format, page_size)
    begin = decoder.register_forward_pre_hook(hooks.begin, with_kwargs=True)
    end = decoder.register_forward_hook(hooks.end, with_kwargs=True, always_call=True)
    batch_function = v4_attention.refuse_generate_batch if v4 else continuous.generate_batch
    model.__dict__["generate_batch"] = partial(batch_function, model)
    model.__dict__[_PATCH] = Patch(implementation, (begin, end))
    return Patched(model)


def register() -> None:
    """Let `from_pretrained(folder, attn_implementation="mlakit")` make models on mlakit.

    The cache is that of `patch`, with rows in the dtype of the weights and pages of 64 tokens.
    Models that are made from then on with another attention have the same subclasses of
    transformers' MLA classes, which do what transformers' do unless the attention is "mlakit".
    """
    _check_transformers("register")
    from mlakit.integrations.transformers.layer_classes import register_classes

    register_classes()


def unregister() -> None:
    """Undo `register`, for models that are made from then on."""
    from mlakit.integrations.transformers.layer_classes import unregister_classes

    unregister_classes()


def _check_transformers(function: str) -> None:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{function}: needs transformers; pip install 'mlakit[transformers]'"
        ) from error
    checks.check_version(transformers.__version__)


def unpatch(model: Any) -> None:
    """Undo `patch`: the model attends as before. Caches that the patched model began are lost."""
    if _PATCH not in model.__dict__:
        raise ValueError(
            "unpatch: the model is not patched; `with patch(model):` undoes a patch by itself"
        )
    undone: Patch = model.__dict__.pop(_PATCH)
    del model.__dict__["generate_batch"]
    for hook in undone.hooks:
        hook.remove()
    for module in v4_attention.v4_modules(model):
        v4_attention.undo(module)
    for module in checks.mla_modules(model):
        module.__dict__.pop("expand_kv", None)
        selected_columns.undo(module)
        attention.forget_up_projection(module)
    if model.config._attn_implementation == checks.NAME:  # not if the caller chose another
        _set_implementation(model, undone.implementation)


def _set_implementation(model: Any, name: str) -> None:
    """Set the attention of the decoder; that of a vision tower stays."""
    config, own = model.config, model.get_decoder().config
    keys = [key for key in config.sub_configs if getattr(config, key) is own]
    model.set_attn_implementation(dict.fromkeys(["", *keys], name))


def refresh_weights(model: Any) -> None:
    """Make what is derived of the weights of a patched model again.

    Call it after writes to weights that torch does not count: through `.data`, as some weight
    synchronisations and loaders write, and to tensors made in inference mode. Other writes, new
    parameters, `load_state_dict` and `to` are seen without it.
    """
    if _PATCH not in model.__dict__:
        raise ValueError("refresh_weights: the model is not patched")
    for module in checks.mla_modules(model):
        attention.up_projection(module).refresh_weights()
