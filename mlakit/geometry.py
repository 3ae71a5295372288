"""The sizes of one model's Multi-head Latent Attention, and the glossary of symbols.

Python keeps the names of the checkpoint's config; kernels and equations use the paper's letters.

    config name          letter   meaning                                             DeepSeek-V3
    num_heads            H        query heads (per device)                            128
    kv_lora_rank         D_C      latent width: what is cached instead of K and V     512
    qk_rope_head_dim     D_R      rotated key part, one for all heads                 64
    qk_nope_head_dim     D_N      unrotated part of a head's query and key            128
    v_head_dim           D_V      width of a head's value                             128
    row.width            D_C+D_R  columns of one cache row                            576
    row.v_width                   columns of a row that serve as the absorbed value   512

Absorbed attention reads a cache row as key (all columns) and as value (the first `v_width`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import log, sqrt
from typing import Any


@dataclass(frozen=True)
class RowShape:
    """The columns of one cache row: `kv_lora_rank` latent, then `qk_rope_head_dim` rotated ones.

    `v_width` is how many leading columns are the absorbed value: the latent ones, except in models
    whose values are the whole row (DeepSeek V4: 448 + 64 columns, all 512 of them value).
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    v_width: int = 0

    def __post_init__(self) -> None:
        if self.v_width == 0:
            object.__setattr__(self, "v_width", self.kv_lora_rank)
        if self.kv_lora_rank < 1:
            raise ValueError(f"kv_lora_rank must be at least 1, got {self.kv_lora_rank}")
        if self.qk_rope_head_dim < 0 or self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim must be even and not negative, got {self.qk_rope_head_dim}"
            )
        if not 0 < self.v_width <= self.width:
            raise ValueError(
                f"v_width must be between 1 and the row width {self.width}, got {self.v_width}"
            )

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class MLAGeometry:
    """Frozen sizes of one attention layer; `attention_mscale` is YaRN's factor on the scores."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    hidden_size: int
    q_lora_rank: int | None = None
    attention_mscale: float = 1.0
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    v_width: int | None = None  # None: the latent columns; `row.v_width` is never None
    row: RowShape = field(init=False, repr=False)

    def __post_init__(self) -> None:
        row = RowShape(self.kv_lora_rank, self.qk_rope_head_dim, self.v_width or 0)
        object.__setattr__(self, "row", row)
        for name in ("num_heads", "qk_nope_head_dim", "v_head_dim", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key in the expanded form."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """mscale² / sqrt(qk_head_dim), the same in both forms: 192 for DeepSeek, never 576."""
        return self.attention_mscale**2 / sqrt(self.qk_head_dim)

    @property
    def has_indexer(self) -> bool:
        """Does the model pick the tokens it attends to (DeepSeek Sparse Attention)?"""
        return self.index_topk > 0

    @property
    def expanded_elements_per_token(self) -> int:
        """Numbers per token an ordinary K/V cache would hold, to compare `row.width` with."""
        return self.num_heads * (self.qk_head_dim + self.v_head_dim)

    def with_heads(self, num_heads: int) -> MLAGeometry:
        """The same layer with other heads, as one rank of a tensor-parallel group holds it."""
        return replace(self, num_heads=num_heads)

    @classmethod
    def preset(cls, name: str) -> MLAGeometry:
        """The geometry of a known model, by name (`PRESETS` lists them)."""
        if name not in PRESETS:
            raise ValueError(f"unknown model {name!r}; choose from {', '.join(PRESETS)}")
        return PRESETS[name]

    @classmethod
    def from_config(cls, config: Any) -> MLAGeometry:
        """The geometry of a transformers config (or of its text model)."""
        config = getattr(config, "text_config", None) or config
        required = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        missing = [name for name in required if getattr(config, name, None) is None]
        if missing:
            raise ValueError(
                f"config {type(config).__name__} is not of an MLA model: it has no {missing[0]}"
            )
        return cls(
            num_heads=config.num_attention_heads,
            hidden_size=config.hidden_size,
            q_lora_rank=getattr(config, "q_lora_rank", None),
            attention_mscale=_attention_mscale(config),
            index_n_heads=getattr(config, "index_n_heads", None) or 0,
            index_head_dim=getattr(config, "index_head_dim", None) or 0,
            index_topk=getattr(config, "index_topk", None) or 0,
            **{name: getattr(config, name) for name in required},
        )


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's temperature: 0.1 · mscale · ln(factor) + 1 for a stretched context, else 1."""
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0


def _attention_mscale(config: Any) -> float:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    mscale_all_dim = rope.get("mscale_all_dim", 0)
    if kind == "default" or not mscale_all_dim:
        return 1.0
    return yarn_mscale(rope["factor"], mscale_all_dim)


_V3 = MLAGeometry(
    num_heads=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    hidden_size=7168,
    q_lora_rank=1536,
    attention_mscale=yarn_mscale(40, 1.0),
)

PRESETS: dict[str, MLAGeometry] = {
    "deepseek-v2-lite": replace(
        _V3,
        num_heads=16,
        hidden_size=2048,
        q_lora_rank=None,
        attention_mscale=yarn_mscale(40, 0.707),
    ),
    "deepseek-v3": _V3,
    "deepseek-v3.2": replace(_V3, index_n_heads=64, index_head_dim=128, index_topk=2048),
    "kimi-k2": replace(_V3, num_heads=64, attention_mscale=yarn_mscale(32, 1.0)),
    "glm-5": MLAGeometry(
        num_heads=64,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        hidden_size=6144,
        q_lora_rank=2048,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=2048,
    ),
    "mistral-small-4": MLAGeometry(
        num_heads=32,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
        hidden_size=4096,
        q_lora_rank=1024,
        attention_mscale=yarn_mscale(128, 1.0),
    ),
    "minicpm3": MLAGeometry(
        num_heads=40,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        hidden_size=2560,
        q_lora_rank=768,
    ),
}
