"""The sizes of DeepSeek-V4's attention layers, read from a model's config.

Each layer attends to a sliding window of rows. Two kinds of layers also attend to compressed rows:

    sliding_attention             the window alone
    compressed_sparse_attention   CSA: rows of overlapping windows of a few tokens (4), of which an
                                  indexer selects the best for each query
    heavily_compressed_attention  HCA: rows of windows of many tokens (128), all of them

A row is key and value of all heads: `head_dim` columns, of which the last `qk_rope_head_dim` are
rotated. Sliding layers rotate by the angles `main`, the others by `compress`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from mlakit.model.config import ConfigFields, config_path, read_config
from mlakit.model.geometry import MLAGeometry, RopeParameters, RowShape
from mlakit.model.releases import ALIASES, DEEPSEEK_V4, RELEASES

LayerKind = Literal[
    "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
]
KINDS: tuple[LayerKind, ...] = get_args(LayerKind)
SLIDING, CSA, HCA = KINDS
# `compress_ratios` of the releases names the kind of each layer by its rate
_DEFAULT_RATES = {CSA: 4, HCA: 128}


@dataclass(frozen=True)
class V4Config:
    """The attention of a DeepSeek-V4 model: sizes that all layers share, and the kind of each.

    rates          tokens of one compressed row, by kind of layer
    epsilon        of all norms
    max_positions  positions of the model's context
    main, compress angles of sliding layers, and of the others
    """

    kinds: tuple[LayerKind, ...]
    hidden_size: int
    num_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    csa_rate: int
    hca_rate: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    epsilon: float
    max_positions: int
    main: RopeParameters
    compress: RopeParameters

    def __post_init__(self) -> None:
        for name in ("num_heads", "sliding_window", "csa_rate", "hca_rate", "o_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.o_groups:
            raise ValueError(
                f"o_groups must divide the {self.num_heads} heads, got {self.o_groups}"
            )
        if not 0 < self.qk_rope_head_dim < self.head_dim or self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim must be even and between 0 and head_dim, {self.head_dim}, got "
                f"{self.qk_rope_head_dim}"
            )
        if CSA in self.kinds and self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim must be at least qk_rope_head_dim, {self.qk_rope_head_dim}, got "
                f"{self.index_head_dim}"
            )

    @cached_property
    def row(self) -> RowShape:
        """The columns of window rows and of compressed rows: all of them are the value."""
        rope = self.qk_rope_head_dim
        return RowShape(self.head_dim - rope, rope, v_width=self.head_dim)

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores, 1 / sqrt(head_dim)."""
        return float(self.head_dim**-0.5)

    def rate(self, kind: LayerKind) -> int:
        """The tokens of one compressed row of a kind of layer."""
        return {CSA: self.csa_rate, HCA: self.hca_rate}[kind]

    def geometry(self, kind: LayerKind = CSA) -> MLAGeometry:
        """The sizes and the angles of a kind of layer as other functions of the package take them.

        The row is the latent: `kv_lora_rank` are its columns without rotation, and there is no
        up-projection.
        """
        plain = self.head_dim - self.qk_rope_head_dim
        return MLAGeometry(
            num_heads=self.num_heads,
            kv_lora_rank=plain,
            qk_nope_head_dim=plain,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            q_lora_rank=self.q_lora_rank,
            index_n_heads=self.index_n_heads,
            index_head_dim=self.index_head_dim,
            index_topk=self.index_topk,
            v_width=self.head_dim,
            rope_parameters=self.main if kind == SLIDING else self.compress,
        )

    @classmethod
    def from_config(cls, config: Any) -> V4Config:
        """The attention of a model's config, with the names of transformers or of the releases.

        config  a dict (the content of a config.json), the path of a config.json or of its folder, a
                config object as in transformers, or the name of a known model
        """
        if isinstance(config, V4Config):
            return config
        if isinstance(config, str) and config_path(config) is None:
            known = ALIASES.get(config.lower(), config.lower())
            config = RELEASES.get(known, config)
        fields = read_config(config)
        model_type = fields.get("model_type")
        if model_type != DEEPSEEK_V4:
            raise ValueError(
                f"{fields.source}: model_type must be {DEEPSEEK_V4}, got {model_type!r}"
            )
        rates, g = _rates(fields), MLAGeometry.from_config(config)
        return cls(
            kinds=_kinds(fields, rates),
            hidden_size=g.hidden_size,
            num_heads=g.num_heads,
            head_dim=g.v_head_dim,
            qk_rope_head_dim=g.qk_rope_head_dim,
            q_lora_rank=fields.integer("q_lora_rank"),
            o_groups=fields.integer("o_groups"),
            o_lora_rank=fields.integer("o_lora_rank"),
            sliding_window=fields.integer("sliding_window", 128),
            csa_rate=rates[CSA],
            hca_rate=rates[HCA],
            index_n_heads=g.index_n_heads,
            index_head_dim=g.index_head_dim,
            index_topk=g.index_topk,
            epsilon=float(fields.number("rms_norm_eps", fields.get("rms_norm_eps", 1e-6))),
            max_positions=fields.integer("max_position_embeddings", 1048576),
            main=RopeParameters.from_fields(fields, "main"),
            compress=g.rope_parameters,
        )


def is_v4(config: Any) -> bool:
    """Whether a config is that of a DeepSeek-V4 model."""
    if isinstance(config, V4Config):
        return True
    if isinstance(config, MLAGeometry):
        return False
    if isinstance(config, str) and config_path(config) is None:
        known = RELEASES.get(ALIASES.get(config.lower(), config.lower()))
        return known is not None and known.get("model_type") == DEEPSEEK_V4
    return bool(read_config(config).get("model_type") == DEEPSEEK_V4)


def _rates(fields: ConfigFields) -> dict[str, int]:
    given = dict(fields.get("compress_rates") or _DEFAULT_RATES)
    for name, kind in (("compress_rate_csa", CSA), ("compress_rate_hca", HCA)):
        given[kind] = fields.integer(name, given.get(kind, _DEFAULT_RATES[kind]))
    return given


def _kinds(fields: ConfigFields, rates: Mapping[str, int]) -> tuple[LayerKind, ...]:
    """The kind of each layer, without those that predict further tokens."""
    count = fields.integer("num_hidden_layers")
    types = fields.get("layer_types")
    if types is None:
        by_rate = {0: SLIDING, _DEFAULT_RATES[CSA]: CSA, _DEFAULT_RATES[HCA]: HCA}
        ratios = fields.get("compress_ratios")
        if ratios is None:
            raise ValueError(f"{fields.source} has no layer_types and no compress_ratios")
        unknown = sorted(set(ratios) - set(by_rate))
        if unknown:
            raise ValueError(
                f"{fields.source}: compress_ratios must be of {sorted(by_rate)}, got {unknown}"
            )
        types = [by_rate[ratio] for ratio in ratios]
    kinds = tuple(types)[:count]
    wrong = sorted(set(kinds) - set(KINDS))
    if wrong or len(kinds) != count:
        raise ValueError(
            f"{fields.source}: layer_types must name one of {', '.join(KINDS)} for each of "
            f"{count} layers, got {len(kinds)} and {', '.join(wrong) or 'no others'}"
        )
    return kinds
