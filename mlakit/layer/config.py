"""The config of one attention layer beyond its sizes, read from the model's config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from mlakit.dispatch.checks import Dims, UnsupportedError
from mlakit.model.config import ConfigFields, config_fields, index_pool
from mlakit.model.geometry import MLAGeometry, Rope
from mlakit.model.releases import HY4, is_glm5_next_type, is_longcat_type
from mlakit.model.v4 import is_v4

NORM_EPSILON = 1e-6
"""Of the norms of the query's and the key's latents in DeepSeek's code and in transformers, also
for models whose config has another `rms_norm_eps`."""

Selection = Literal["own", "shared"]
"""Whether a layer has an indexer, or attends to the rows that the layer before it selected."""


@dataclass(frozen=True)
class QueryScale:
    """Mistral 4: a query at position p is multiplied by 1 + beta · ln(1 + floor(p / original))."""

    beta: float
    original: int  # positions of the context in training


@dataclass(frozen=True)
class LayerConfig:
    """One attention layer: its sizes, and the choices in which models differ.

    epsilon        of the RMSNorm of the latents. vLLM takes the config's `rms_norm_eps`, and so
                   does transformers for GLM-5.3-Flash. DeepSeek's code and, for other models,
                   transformers take 1e-6, the default here
    has_bias       `attention_bias`: q_a_proj, kv_a_proj_with_mqa and o_proj have a bias
    q_factor       the query is multiplied by it (LongCat: sqrt(hidden_size / q_lora_rank))
    latent_factor  the normalised latent is multiplied by it, before it is cached (LongCat)
    query_scale    the query's factor that depends on its position (Mistral 4)
    selection      None: the layer attends to all cached tokens
    gate           the projection of the output's gate, by its name in checkpoints: the output of
                   attention is multiplied by the sigmoid of it, before o_proj (Hy4, Kimi K3)
    has_sinks      a logit per head joins the denominator of attention (Hy4)
    index_rope     the column pairs that the indexer rotates
    index_rope_last   it rotates its last columns, not the first (Hy4)
    index_epsilon  of the norm of its keys
    index_rms_norm its keys pass an RMSNorm, not a LayerNorm (LongCat)
    init_tokens, local_tokens   first and last keys of a query that are always selected (LongCat)
    index_pool     tokens of a pool, which has one index key (GLM-5.3-Flash)
    selects_tail   whether a query attends to the tokens after its last complete pool, too
    index_hadamard whether the indexer multiplies queries and keys by a Hadamard matrix, which
                   changes no score but makes FP8 more accurate (DeepSeek-V3.2)
    max_positions  positions of the model's context
    softmax_scale  None: the geometry's
    """

    geometry: MLAGeometry
    epsilon: float = NORM_EPSILON
    has_bias: bool = False
    q_factor: float = 1.0
    latent_factor: float = 1.0
    query_scale: QueryScale | None = None
    selection: Selection | None = None
    gate: str | None = None
    has_sinks: bool = False
    index_rope: Rope = "half"
    index_rope_last: bool = False
    index_epsilon: float = NORM_EPSILON
    index_rms_norm: bool = False
    init_tokens: int = 0
    local_tokens: int = 0
    index_pool: int = 1
    selects_tail: bool = True
    index_hadamard: bool = False
    max_positions: int | None = None
    softmax_scale: float | None = None

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return self.geometry.softmax_scale if self.softmax_scale is None else self.softmax_scale

    def positions(self, given: int | None = None) -> int:
        """Rows of the RoPE table: as given, or the model's."""
        dims = Dims("LayerConfig")
        count = self.max_positions if given is None else given
        if count is None:
            must = "be given if the config has no max_position_embeddings"
            dims.fail("max_positions", must, None)
        return dims.integer("max_positions", count, 1)

    def with_heads(self, num_heads: int) -> LayerConfig:
        """The same layer with the heads of one tensor-parallel rank."""
        return replace(self, geometry=self.geometry.with_heads(num_heads))

    @classmethod
    def from_config(cls, config: Any, layer: int = 0) -> LayerConfig:
        """The layer of this number in a model.

        config  what `MLAGeometry.from_config` takes. A geometry has no more than the sizes and the
                scale, which is all of DeepSeek V2 and V3 and of Kimi K2
        """
        if isinstance(config, LayerConfig):
            return config
        if is_v4(config):
            raise UnsupportedError(
                "MLAAttention: config must not be that of DeepSeek-V4, whose layers are V4Attention"
            )
        geometry = MLAGeometry.from_config(config)
        if isinstance(config, MLAGeometry):
            return cls(
                geometry,
                selection="own" if geometry.has_indexer else None,
                max_positions=geometry.rope_parameters.max_position_embeddings,
            )
        fields = config_fields(config)
        model_type = fields.get("model_type")
        rank, hidden = geometry.q_lora_rank, geometry.hidden_size
        is_longcat, is_hy4 = is_longcat_type(model_type), model_type == HY4
        has_rms_norm = fields.get("index_k_norm_type", "layer") == "rms"
        scales_q = bool(fields.get("mla_scale_q_lora", is_longcat)) and rank
        scales_latent = bool(fields.get("mla_scale_kv_lora", is_longcat))
        interleaved = fields.get(
            "indexer_rope_interleave", is_longcat or model_type == "glm_moe_dsa"
        )
        has_own_epsilon = is_glm5_next_type(model_type)
        return cls(
            geometry,
            epsilon=fields.get("rms_norm_eps", 1e-5) if has_own_epsilon else NORM_EPSILON,
            has_bias=bool(fields.get("attention_bias", False)),
            q_factor=(hidden / rank) ** 0.5 if scales_q and rank else 1.0,
            latent_factor=(hidden / geometry.kv_lora_rank) ** 0.5 if scales_latent else 1.0,
            query_scale=_query_scale(fields),
            selection=_selection(fields, geometry, layer),
            gate=_gate(fields),
            has_sinks=is_hy4,
            index_rope="interleaved" if interleaved else "half",
            index_rope_last=is_hy4,
            index_epsilon=fields.get("rms_norm_eps", 1e-5)
            if is_hy4 or has_rms_norm
            else NORM_EPSILON,
            index_rms_norm=has_rms_norm,
            init_tokens=fields.integer("index_init_tokens", 0),
            local_tokens=fields.integer("index_local_tokens", 0),
            index_pool=_pool(fields, geometry),
            selects_tail=bool(fields.get("index_kpool_always_select_tail", True)),
            index_hadamard=model_type == "deepseek_v32",
            max_positions=fields.get("max_position_embeddings", fields.get("model_max_length")),
        )


def _gate(fields: ConfigFields) -> str | None:
    if fields.get("model_type") == HY4:
        return "gate_proj"
    return "g_proj" if fields.get("mla_use_output_gate", False) else None


def _pool(fields: ConfigFields, geometry: MLAGeometry) -> int:
    """Tokens of a pool of index keys."""
    if not geometry.has_indexer:
        return 1
    size, dims = index_pool(fields), Dims("LayerConfig")
    must = f"divide index_topk, {geometry.index_topk}"
    dims.require(geometry.index_topk % size == 0, "index_kpool", must, size)
    return size


def _query_scale(fields: ConfigFields) -> QueryScale | None:
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    beta = rope.get("llama_4_scaling_beta")
    if not beta:
        return None
    scaling = ConfigFields(rope, f"rope parameters of {fields.source}")
    original = scaling.integer("original_max_position_embeddings")
    return QueryScale(float(fields.number("llama_4_scaling_beta", beta)), original)


def _selection(fields: ConfigFields, geometry: MLAGeometry, layer: int) -> Selection | None:
    """GLM gives a type per layer, as a list, as letters or by a frequency.

    LongCat counts attentions, of which a layer has two.
    """
    if not geometry.has_indexer:
        return None
    types = fields.get("indexer_types")
    if types is None:
        types = fields.get("index_topk_pattern")
    if types is not None:
        # a layer beyond the list predicts further tokens and has an indexer
        kind = types[layer] if layer < len(types) else "full"
        return "shared" if kind in ("shared", "S") else "own"
    if fields.get("cli_factor") is not None:
        return "shared" if layer % max(fields.integer("cli_factor"), 1) else "own"
    every = 4 if fields.get("model_type") == HY4 else 1  # the defaults of transformers
    frequency = max(fields.integer("index_topk_freq", every), 1)
    since_first = max(layer - fields.integer("index_skip_topk_offset", 2) + 1, 0)
    return "own" if since_first % frequency == 0 else "shared"
