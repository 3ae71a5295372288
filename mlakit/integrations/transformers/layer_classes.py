"""The MLA classes of transformers over latent rows, for models that are made with them.

    register_classes()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="mlakit")

`patch` changes a model that is loaded; these classes take the place of the model's own while it is
made. Their modules do what the hooks of `patch` do: the first layer begins a step, the last layer
commits it. On the Hub the classes are the layers of the package, by the names of transformers:
`KernelConfig({"DeepseekV3Attention": "mlakit/mlakit:DeepseekV3Attention"})`.
"""

from __future__ import annotations

from functools import cache, wraps
from importlib import import_module
from inspect import signature
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from mlakit import UnsupportedError
from mlakit.integrations.transformers import attention, checks, selected_columns
from mlakit.integrations.transformers.cache_layers import LatentLayer, pools_of
from mlakit.integrations.transformers.pool import LatentPool
from mlakit.integrations.transformers.static_cache import StaticLatentCache
from mlakit.integrations.transformers.step_hooks import check_rows, register_attention

# class, and its folder in transformers.models
CLASSES = {
    "AXK1Attention": "axk1",
    "AXK2Attention": "axk2",
    "DeepseekV2Attention": "deepseek_v2",
    "DeepseekV32Attention": "deepseek_v32",
    "DeepseekV3Attention": "deepseek_v3",
    "Glm5NextTextAttention": "glm5_next",
    "Glm4MoeLiteAttention": "glm4_moe_lite",
    "GlmMoeDsaAttention": "glm_moe_dsa",
    "HYV4Attention": "hy_v4",
    "KimiLinearAttention": "kimi_linear",
    "LongcatFlashMLA": "longcat_flash",
    "MiniCPM3Attention": "minicpm3",
    "Mistral4Attention": "mistral4",
    "YoutuAttention": "youtu",
}
LAYOUT = "Layout"
PAGE_SIZE = 64


def register_classes() -> None:
    """Have models made with the classes below, as far as this release has them.

    transformers' own `register_patch_mapping` would fail without torchvision: in 5.17 it looks into
    every module, also those of image processors.
    """
    register_attention()
    for name in CLASSES:
        if _original(name) is not None:
            setattr(_modeling(name), name, latent_class(name))


def unregister_classes() -> None:
    """Have models made with the classes of transformers again."""
    for name in CLASSES:
        original = _original(name)
        if original is not None:
            setattr(_modeling(name), name, original)


def is_active(module: nn.Module) -> bool:
    """The module is of such a class, its model's attention is mlakit's, and it is not patched."""
    config: Any = module.config
    is_ours = config._attn_implementation == checks.NAME
    return (
        isinstance(module, checks.LatentAttention)
        and is_ours
        and "expand_kv" not in module.__dict__
    )


@cache
def latent_class(name: str, *, is_always: bool = False) -> type[nn.Module]:
    """A subclass of an attention class of transformers that attends over latent rows.

    is_always  its models have mlakit's attention, not only those made with `attn_implementation`
    """
    original: Any = _original(name)
    if original is None:
        raise AttributeError(f"transformers {transformers.__version__} has no {name} with latents")
    names = tuple(signature(original.forward).parameters)[1:]

    class Latent(checks.LatentAttention, original):  # type: ignore[misc]
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            if is_always:
                register_attention()
                config._attn_implementation = checks.NAME

        def expand_kv(self, latent: Any, k_rope: Tensor) -> Any:
            active = is_active(self)
            return (latent, k_rope) if active else original.expand_kv(self, latent, k_rope)

        @wraps(original.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not is_active(self):
                return original.forward(self, *args, **kwargs)
            given = dict(zip(names, args, strict=False)) | kwargs
            pool = _begin(self, given)
            selected_columns.hand_over(self)
            try:
                result = original.forward(self, **given)
            finally:
                selected_columns.undo(self)
            if pool is not None and self.layer_idx == _layers(self)[-1]:
                attention.uncached.pools = {}
                pool.commit()
            return result

    Latent.__name__ = Latent.__qualname__ = name
    Latent.__module__ = original.__module__  # where a pickled model finds it, once registered
    return Latent


def __getattr__(name: str) -> Any:
    """Return a layer of the Hub and, with "Layout" after its name, the class that is made for it.

    `kernels` gives the modules of the second the forward of the first.
    """
    layer = name.removesuffix(LAYOUT)
    if layer not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return latent_class(layer, is_always=True) if name != layer else _kernel(layer)


@cache
def _kernel(name: str) -> type[nn.Module]:
    """A class without a constructor, as `kernels` wants it."""
    members = {"forward": latent_class(name, is_always=True).forward, "has_backward": False}
    return type(name, (nn.Module,), {**members, "__module__": __name__})


@cache
def _original(name: str) -> Any:
    """The class of transformers; None if this release has none that caches latents."""
    found = getattr(_modeling(name), name, None)
    return found if hasattr(found, "expand_kv") else None


def _modeling(name: str) -> Any:
    """The module of transformers that has the class, or None."""
    try:
        return import_module(f"transformers.models.{CLASSES[name]}.modeling_{CLASSES[name]}")
    except ModuleNotFoundError:
        return None


def _layers(module: Any) -> tuple[int, ...]:
    """The indices of the model's MLA layers in a cache."""
    known: tuple[int, ...] | None = module.__dict__.get("_mlakit_layers")
    if known is None:
        made = DynamicCache(config=module.config).layers
        kinds = (DynamicLayer, DynamicIndexedLayer)
        known = tuple(index for index, each in enumerate(made) if type(each) in kinds)
        module.__dict__["_mlakit_layers"] = known
    return known


def _begin(module: Any, given: dict[str, Any]) -> LatentPool | None:
    """The pool of the call, in which the first layer begins a step; None for a static cache."""
    checks.check_inference(module, [module])
    cache, mask, x = (
        given.get("past_key_values"),
        given.get("attention_mask"),
        given["hidden_states"],
    )
    if mask is not None and mask.ndim == 4:  # that of a sparse model: 0 where a token is visible
        mask = mask[:, 0, -1] == 0
    layers, device = _layers(module), checks.device_of(module)
    is_first = module.layer_idx == layers[0]
    if isinstance(cache, StaticLatentCache):
        if is_first and getattr(module.config, "index_topk", None) is None:
            checks.check_no_padding(mask, cache.get_max_length())
        return None
    if cache is None:
        pools = attention.uncached.pools
        if is_first or not pools:
            pools = attention.uncached.pools = {device: LatentPool(1, None, PAGE_SIZE, device)}
        pool = next(iter(pools.values()))
    elif is_first:
        (pool,) = pools_of(cache, dict.fromkeys(layers, device), None, PAGE_SIZE)
        check_rows(module, None, None if pool.cache is None else pool.cache.format)
    else:
        known: LatentLayer = cache.layers[module.layer_idx]
        pool = known.pool
    if is_first:
        if mask is not None and selected_columns.pools_keys(module):  # that of the new columns
            mask = pool.whole_mask(mask)
        pool.begin_step(x.shape[0], x.shape[1], mask)
    if pool.device != device:  # the first layer does not know where the others are
        raise UnsupportedError(
            'mlakit: a model of attn_implementation="mlakit" must have all layers on one device, '
            f"got {pool.device} and {device}; `patch` takes several"
        )
    return pool
