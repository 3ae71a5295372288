"""The sizes of a model's Multi-head Latent Attention, and the glossary of symbols.

Python uses the names of the checkpoint's config; kernels and equations use the paper's letters.

    config name          letter   meaning                                             DeepSeek-V3
    num_heads            H        query heads (per device)                            128
    kv_lora_rank         D_C      latent columns, cached instead of K and V           512
    qk_rope_head_dim     D_R      rotated key columns, shared by all heads            64
    qk_nope_head_dim     D_N      unrotated columns of a head's query and key         128
    v_head_dim           D_V      width of a head's value                             128
    row.width            D_C+D_R  columns of one cache row                            576
    row.v_width                   columns of a row that are the absorbed value        512

Absorbed attention uses a cache row as key (all columns) and as value (the first `v_width`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isclose, log, sqrt
from typing import Any, Literal, get_args

from mlakit.model.config import ConfigFields, config_path, read_config
from mlakit.model.releases import ALIASES, DEEPSEEK_V4, HY4, RELEASES

Rope = Literal["interleaved", "half"]
"""The column pairs that RoPE rotates: (0, 1), (2, 3), … or (p, p + D_R/2)."""
ROPES: tuple[Rope, ...] = get_args(Rope)


@dataclass(frozen=True)
class RowShape:
    """The columns of one cache row: `kv_lora_rank` latent, then `qk_rope_head_dim` rotated columns.

    The first `v_width` columns are the absorbed value: by default the latent columns, and the whole
    row in DeepSeek V4 (448 + 64 columns).
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
        """Columns of the row."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, repr=False)
class RopeParameters:
    """The RoPE frequencies of a model: `rope_parameters` (or `rope_theta` and `rope_scaling`) of
    its config, with the names of transformers.

    `rope_type` is default, linear, dynamic, yarn, longrope, llama3, proportional, or none for a
    model without rotation. `rope_table` computes the angles and checks what a type needs.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float | None = None
    max_position_embeddings: int | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    partial_rotary_factor: float | None = None

    def __repr__(self) -> str:
        """The type, theta, and the fields that differ from their defaults."""
        shown = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name in ("rope_type", "rope_theta") or getattr(self, f.name) != f.default
        ]
        return f"RopeParameters({', '.join(shown)})"

    @classmethod
    def from_fields(cls, fields: ConfigFields, label: str | None = None) -> RopeParameters:
        """The RoPE fields of a config, old or new names, with the defaults of transformers.

        label  of one of the two sets of DeepSeek-V4: `main` or `compress`
        """
        return _rope_parameters(fields if label is None else _labelled(fields, label))

    @property
    def attention_mscale(self) -> float:
        """YaRN's factor on the scores as in DeepSeek, from `mscale_all_dim`; 1 without it."""
        if self.rope_type in ("default", "none") or not self.mscale_all_dim:
            return 1.0
        if self.factor is None:
            raise ValueError(f"rope_parameters: {self.rope_type} must have a factor, got None")
        return yarn_mscale(self.factor, self.mscale_all_dim)


@dataclass(frozen=True)
class MLAGeometry:
    """The sizes of one attention layer, frozen; `attention_mscale` is YaRN's factor on the scores.

    `rope` is the pairing of the rotated columns, for `norm_rope_quant_append` and `LayerWeights`.
    `rope_parameters` gives the angles, which `rope_table` computes.
    """

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
    v_width: int | None = None  # None: kv_lora_rank; `row.v_width` is never None
    rope: Rope = "interleaved"
    rope_parameters: RopeParameters = field(default_factory=RopeParameters)
    row: RowShape = field(init=False, repr=False)

    def __post_init__(self) -> None:
        row = RowShape(self.kv_lora_rank, self.qk_rope_head_dim, self.v_width or 0)
        object.__setattr__(self, "row", row)
        for name in ("num_heads", "qk_nope_head_dim", "v_head_dim", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.rope not in ROPES:
            raise ValueError(f"rope must be one of {', '.join(ROPES)}, got {self.rope!r}")

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key in the expanded form."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """mscale² / sqrt(qk_head_dim), also for absorbed attention: 192 for DeepSeek, never 576."""
        return self.attention_mscale**2 / sqrt(self.qk_head_dim)

    @property
    def has_indexer(self) -> bool:
        """Whether the model selects the tokens it attends to (DeepSeek Sparse Attention)."""
        return self.index_topk > 0

    @property
    def expanded_elements_per_token(self) -> int:
        """Elements per token of a K/V cache without MLA, to compare with `row.width`."""
        return self.num_heads * (self.qk_head_dim + self.v_head_dim)

    def with_heads(self, num_heads: int) -> MLAGeometry:
        """The same layer with another number of heads, for one tensor-parallel rank."""
        return replace(self, num_heads=num_heads)

    @classmethod
    def preset(cls, name: str) -> MLAGeometry:
        """The geometry of a known model, by its name in `PRESETS`, an alias or its Hub id
        (`deepseek-v3`, `deepseek-r1`, `deepseek-ai/DeepSeek-R1`); case does not matter."""
        known = _preset_name(name)
        if known is None:
            raise ValueError(f"unknown model {name!r}; choose from {', '.join(PRESETS)}")
        return PRESETS[known]

    @classmethod
    def from_config(cls, config: Any) -> MLAGeometry:
        """The geometry of a model's config, or of its `text_config`.

        config  a dict (the content of a config.json), the path of a config.json or of its folder,
                a config object as in transformers, or a name that `preset` takes (a folder of that
                name has precedence); a geometry is returned unchanged

        RoPE may be given as `rope_theta` with `rope_scaling`, or as `rope_parameters`.
        """
        if isinstance(config, MLAGeometry):
            return config
        if isinstance(config, str) and config_path(config) is None:
            known = _preset_name(config)
            if known is None:
                raise ValueError(
                    f"config {config!r} is not a config.json, a folder with one or a known "
                    f"model; choose from {', '.join(PRESETS)}"
                )
            return PRESETS[known]
        return _from_fields(read_config(config))


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's mscale: 0.1 · mscale · ln(factor) + 1 if factor > 1, else 1."""
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0


def _preset_name(name: object) -> str | None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a model must be a string, got {type(name).__name__}")
    known = ALIASES.get(name.lower(), name.lower())
    return known if known in PRESETS else None


# defaults of transformers for fields that configs of these model types omit
_HALF_ROTATION = ("minicpm3", HY4)
# the model types whose modules obey `rope_interleave`; the others ignore it
_READ_ROPE_INTERLEAVE = ("axk1", "deepseek_v3", "glm4_moe_lite", "mistral4", "youtu")
_DEFAULT_THETA = {"longcat_flash": 1e7}
# vLLM's name for DeepSeek's YaRN
_ROPE_TYPE_ALIASES = {"deepseek_yarn": "yarn"}
_ORIGINAL = "original_max_position_embeddings"
_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "max_position_embeddings",
    _ORIGINAL,
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "partial_rotary_factor",
)
_MSCALES = ("mscale", "mscale_all_dim")  # DeepSeek-V4 does not multiply by them
_ROPE_LISTS = ("short_factor", "long_factor")
_OPTIONAL = (
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
    "low_freq_factor",
    "high_freq_factor",
    "partial_rotary_factor",
)


def _from_fields(config: ConfigFields) -> MLAGeometry:
    if config.get("model_type") == DEEPSEEK_V4:
        return _v4_from_fields(config)
    latent = config.integer("kv_lora_rank")  # first: only MLA models have it
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    if config.get("v_head_dim") is None and config.get("model_type") == "minicpm3":
        v_head_dim = hidden // heads
    else:
        v_head_dim = config.integer("v_head_dim")
    rope_parameters = _rope_parameters(config)
    return MLAGeometry(
        num_heads=heads,
        kv_lora_rank=latent,
        qk_nope_head_dim=config.integer("qk_nope_head_dim"),
        qk_rope_head_dim=config.integer("qk_rope_head_dim"),
        v_head_dim=v_head_dim,
        hidden_size=hidden,
        q_lora_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        attention_mscale=rope_parameters.attention_mscale,
        index_n_heads=config.integer("index_n_heads", 0),
        index_head_dim=config.integer("index_head_dim", 0),
        index_topk=config.integer("index_topk", 0),
        rope=_rope(config),
        rope_parameters=rope_parameters,
    )


def _v4_from_fields(config: ConfigFields) -> MLAGeometry:
    """DeepSeek-V4: a row is key and value of all heads, and there is no up-projection.

    The latent is what is not rotated. The angles are those of layers that compress.
    """
    width = config.integer("head_dim", 512)
    if config.get("qk_rope_head_dim") is None:
        part = config.number("partial_rotary_factor", config.get("partial_rotary_factor", 1 / 8))
        rope = round(width * part)
        if not isclose(rope, width * part):
            must = f"partial_rotary_factor must give whole columns of {width}"
            raise ValueError(f"{config.source}: {must}, got {part}")
    else:
        rope = config.integer("qk_rope_head_dim")
    if not 0 < rope < width:
        must = f"qk_rope_head_dim must be even and between 0 and head_dim, {width}"
        raise ValueError(f"{config.source}: {must}, got {rope}")
    return MLAGeometry(
        num_heads=config.integer("num_attention_heads"),
        kv_lora_rank=width - rope,
        qk_nope_head_dim=width - rope,
        qk_rope_head_dim=rope,
        v_head_dim=width,
        hidden_size=config.integer("hidden_size"),
        q_lora_rank=config.integer("q_lora_rank"),
        index_n_heads=config.integer("index_n_heads", 64),
        index_head_dim=config.integer("index_head_dim", 128),
        index_topk=config.integer("index_topk", 512),
        v_width=width,
        rope_parameters=RopeParameters.from_fields(config, "compress"),
    )


def _labelled(config: ConfigFields, label: str) -> ConfigFields:
    """The fields of one set of angles: nested under its label, or of a config with one set."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        got = type(given).__name__
        raise TypeError(f"{config.source}: rope_parameters must be a dict, got {got}")
    if isinstance(given.get("main"), Mapping) and isinstance(given.get("compress"), Mapping):
        rope = dict(given[label])
    elif label == "main":
        rope = {"rope_theta": config.get("rope_theta", 1e4)}
    else:
        rope = {key: value for key, value in given.items() if key not in _MSCALES}
        rope["rope_theta"] = config.get("compress_rope_theta", 1.6e5)
        if rope.get("rope_type", rope.get("type")) == "yarn":
            rope.setdefault("attention_factor", 1.0)
    rope.pop("partial_rotary_factor", None)  # the columns are those that are rotated
    longest = config.integer("max_position_embeddings", 1 << 20)
    fields = {"rope_parameters": rope, "max_position_embeddings": longest}
    return ConfigFields(fields, config.source)


def _rope(config: ConfigFields) -> Rope:
    model_type = config.get("model_type")
    if model_type in _HALF_ROTATION:
        return "half"
    # a config without a type describes no module but itself
    is_read = model_type is None or model_type in _READ_ROPE_INTERLEAVE
    # null is false to transformers
    return "interleaved" if not is_read or config.stored("rope_interleave", True) else "half"


def _rope_parameters(config: ConfigFields) -> RopeParameters:
    """The RoPE fields of a config, old or new names, with the defaults of transformers."""
    model_type = config.get("model_type")
    # Kimi Linear has no positions: its rope columns are not rotated
    if config.get("mla_use_nope", model_type == "kimi_linear"):
        return RopeParameters("none")
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(name, {})
    if not isinstance(rope, Mapping):
        raise TypeError(f"{config.source}: {name} must be a dict, got {type(rope).__name__}")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"{config.source}: {name} must be for one layer type, got {', '.join(map(str, rope))}"
        )
    given: dict[str, Any] = {
        key: _rope_value(config, key, value) for key, value in rope.items() if value is not None
    }
    rope_type = given.get("rope_type", given.get("type", "default"))
    if not isinstance(rope_type, str):
        raise TypeError(f"{config.source}: rope_type must be a string, got {rope_type!r}")
    rope_type = _ROPE_TYPE_ALIASES.get(rope_type, rope_type)
    theta = given.get("rope_theta", config.get("rope_theta", _DEFAULT_THETA.get(model_type, 1e4)))
    longest = _rope_value(config, "max_position_embeddings", config.get("max_position_embeddings"))
    before = _rope_value(config, _ORIGINAL, config.get(_ORIGINAL, given.get(_ORIGINAL)))
    if rope_type in ("yarn", "longrope", "llama3"):
        before = longest if before is None else before
    factor = given.get("factor")
    if factor is None and rope_type in ("yarn", "longrope") and longest and before:
        factor = longest / before
    if "partial_rotary_factor" not in given and config.get("partial_rotary_factor") is not None:
        given["partial_rotary_factor"] = config.get("partial_rotary_factor")
    return RopeParameters(
        rope_type=rope_type,
        rope_theta=float(config.number("rope_theta", theta)),
        factor=factor,
        max_position_embeddings=longest,
        original_max_position_embeddings=before,
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        **{key: given[key] for key in _OPTIONAL if key in given},
    )


def _rope_value(config: ConfigFields, name: str, value: Any) -> Any:
    """A value among the RoPE fields, with the type that `RopeParameters` needs."""
    if name in _ROPE_LISTS:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{config.source}: {name} must be a list of numbers, got {value!r}")
        return tuple(config.number(f"{name}[{i}]", each) for i, each in enumerate(value))
    is_number = value is not None and name in _ROPE_NUMBERS
    return config.number(name, value) if is_number else value


PRESETS: dict[str, MLAGeometry] = {
    name: _from_fields(read_config(config)) for name, config in RELEASES.items()
}
