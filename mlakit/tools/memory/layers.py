"""The layers of a model that have a latent cache, and those that have an index-key cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mlakit.model.config import ConfigFields, config_fields
from mlakit.model.geometry import MLAGeometry
from mlakit.model.releases import HY4, is_longcat_type
from mlakit.model.v4 import CSA, V4Config, is_v4

LINEAR = "linear_attention"


class LayerCounts(NamedTuple):
    """Layers without those for multi-token prediction.

    total    attention layers of the model
    mla      layers with MLA; the others have linear attention and a state of constant size
    indexer  MLA layers with an indexer of their own; the others have none, or share the selection
             of an earlier layer
    """

    total: int
    mla: int
    indexer: int


def read_model(config: str) -> tuple[ConfigFields, MLAGeometry, LayerCounts]:
    """A known model, or the one of a config.json or its folder. Raises ValueError."""
    try:
        geometry = MLAGeometry.from_config(config)
        fields = config_fields(config)
        if is_v4(config):
            kinds = V4Config.from_config(config).kinds
            return fields, geometry, LayerCounts(len(kinds), len(kinds), kinds.count(CSA))
        return fields, geometry, layer_counts(fields)
    except (TypeError, OSError) as error:  # a field of another type; a file that cannot be read
        raise ValueError(str(error)) from None


def layer_counts(config: ConfigFields) -> LayerCounts:
    """The layers of a config. Raises ValueError if the config does not determine them."""
    is_mla = _mla_layers(config, _num_layers(config))
    has_indexer = _indexer_layers(config, len(is_mla))
    pairs = zip(is_mla, has_indexer, strict=True)
    return LayerCounts(len(is_mla), sum(is_mla), sum(mla and indexer for mla, indexer in pairs))


def _num_layers(config: ConfigFields) -> int:
    # a layer of LongCat-Flash has two attentions; transformers adds num_hidden_layers
    is_double = is_longcat_type(config.get("model_type"))
    name = "num_layers" if is_double else "num_hidden_layers"
    if config.get(name) is None:
        raise ValueError(f"{config.source} has no {name}: its cache cannot be computed")
    found = config.integer(name)
    if found < 1:
        raise ValueError(f"{config.source}: {name} must be at least 1, got {found}")
    return 2 * found if is_double else found


def _mla_layers(config: ConfigFields, total: int) -> list[bool]:
    types = config.get("layer_types")
    if types is not None:
        return [each != LINEAR for each in _per_layer(config, "layer_types", types, total)]
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and linear.get("full_attn_layers") is not None:
        full = set(linear["full_attn_layers"])  # counted from 1
        return [layer in full for layer in range(1, total + 1)]
    if linear is not None or config.get("model_type") == "kimi_linear":
        raise ValueError(
            f"{config.source} has no layer_types and no linear_attn_config.full_attn_layers: "
            "its MLA layers are unknown"
        )
    return [True] * total


def _indexer_layers(config: ConfigFields, total: int) -> list[bool]:
    if not config.get("index_topk", 0):
        return [False] * total
    for name in ("indexer_types", "index_topk_pattern"):
        kinds = config.get(name)
        if kinds is not None:
            owning = ("full", "F", "C")
            return [each in owning for each in _per_layer(config, name, kinds, total)]
    if config.get("cli_factor") is not None:
        return [layer % max(config.integer("cli_factor"), 1) == 0 for layer in range(total)]
    # the defaults of transformers
    every = max(config.get("index_topk_freq", 4 if config.get("model_type") == HY4 else 1), 1)
    offset = config.get("index_skip_topk_offset", 2)
    return [max(layer - offset + 1, 0) % every == 0 for layer in range(total)]


def _per_layer(config: ConfigFields, name: str, kinds: Any, total: int) -> list[Any]:
    """The entries of the model's layers; those of layers for multi-token prediction follow."""
    if len(kinds) < total:
        raise ValueError(f"{config.source}: {name} must have {total} entries, got {len(kinds)}")
    return list(kinds)[:total]
