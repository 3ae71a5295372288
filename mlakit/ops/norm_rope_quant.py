"""RoPE, RMSNorm, quantise and append: what a step does with its new tokens before attending."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mlakit import dispatch
from mlakit.cache import CacheLayer, PagedLatentCache, PageTable
from mlakit.checks import E4M3, FLOATS, Dims
from mlakit.geometry import ROPES, Rope
from mlakit.knobs import Backend
from mlakit.ops._arguments import (
    check_kv_lens,
    check_layer,
    check_page_table,
    check_query_starts,
    check_result,
    check_used_rows,
)
from mlakit.ops._library import Op
from mlakit.specs import Problem, device_facts

NAME = "norm_rope_quant_append"


def norm_rope_quant_append(
    q_rope: Tensor,
    kv: Tensor,
    freqs: Tensor,
    gamma: Tensor,
    cache: PagedLatentCache,
    page_table: PageTable,
    kv_lens: Tensor,
    q_starts: Tensor | None,
    *,
    epsilon: float,
    layer: int = 0,
    rope: Rope = "interleaved",
    q_rope_out: Tensor | None = None,
    power_of_two_scales: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Rotate the queries; rotate, normalise, quantise the new tokens' latents into the cache.

        q_rope' = R(position) q_rope      row = [ x · rsqrt(mean x² + ε) · γ , R(position) k_rope ]

    q_rope     [tokens, heads, D_R]
    kv         [tokens, D_C + D_R] raw latents x, then the raw shared key k_rope
    freqs      [positions, D_R] cos0, sin0, cos1, sin1, …; the rotation rounds in this dtype
    gamma      [D_C]; the norm is float32, rounded to this dtype, then multiplied
    page_table as in `mla_decode`, with room for the new tokens
    kv_lens    [batch] int32 tokens cached before this step: token i of a request is at kv_len + i
    q_starts   [batch + 1] int32 rows of q per request; None means one new token each
    rope       "interleaved" rotates pairs (0, 1), (2, 3), …; "half" pairs (p, p + D_R/2)
    q_rope_out where the rotated queries go: q_rope itself, a strided slice, or e4m3 (saturating)

    Returns the rotated queries. Nothing but them and the new tokens' cache rows is written.
    """
    (result,) = OP.call(
        (q_rope_out,),
        {
            "q_rope": q_rope,
            "kv": kv,
            "freqs": freqs,
            "gamma": gamma,
            "layer": check_layer(NAME, cache, layer),
            "page_table": page_table,
            "kv_lens": kv_lens,
            "q_starts": q_starts,
            "epsilon": epsilon,
            "rope": rope,
            "power_of_two_scales": power_of_two_scales,
            "backend": backend,
        },
    )
    return result


@dataclass(frozen=True, eq=False)
class AppendArguments:
    q_rope: Tensor
    kv: Tensor
    freqs: Tensor
    gamma: Tensor
    layer: CacheLayer = field(metadata={"written": True})
    page_table: PageTable
    kv_lens: Tensor
    q_starts: Tensor | None
    epsilon: float
    rope: str
    power_of_two_scales: bool
    backend: str


def _append(a: AppendArguments, q_rope_out: Tensor | None) -> tuple[Tensor]:
    dims = Dims(NAME)
    row = a.layer.codec.row
    dims.bind("rope", row.qk_rope_head_dim, "the cache's qk_rope_head_dim")
    dims.bind("latent", row.kv_lora_rank, "the cache's kv_lora_rank")
    dims.bind("width", row.width, "the row width of the cache")
    axes = ("tokens", "heads", "rope")
    dims.match("q_rope", a.q_rope, *axes, dtypes=FLOATS)
    dims.rows_contiguous("q_rope", a.q_rope)
    dims.match("kv", a.kv, "tokens", "width", dtypes=FLOATS)
    dims.rows_contiguous("kv", a.kv)
    dims.match("freqs", a.freqs, "positions", "rope", dtypes=FLOATS)
    dims.match("gamma", a.gamma, "latent", dtypes=FLOATS)
    dims.same_device("cache", a.layer.payload)
    check_rope(dims, a.rope, a.epsilon)
    lengths = check_kv_lens(dims, a.kv_lens)
    starts = check_query_starts(dims, a.q_starts, dims["tokens"], dims["batch"])
    check_page_table(dims, a.page_table, dims["batch"])
    if lengths is not None:
        _check_positions(dims, a, starts, lengths)
    dtypes = (a.q_rope.dtype,) if q_rope_out is None else (a.q_rope.dtype, E4M3)
    if q_rope_out is not None:
        dims.dtype("q_rope_out", dims.tensor("q_rope_out", q_rope_out), *dtypes)
    dtype = a.q_rope.dtype if q_rope_out is None else q_rope_out.dtype
    q_rope_out = check_result(dims, "q_rope_out", q_rope_out, *axes, dtype=dtype)

    problem = Problem(
        *device_facts(a.q_rope.device),
        dtype=str(a.q_rope.dtype),
        format=a.layer.codec.name,
        heads=dims["heads"],
        page_size=a.layer.page_size,
        row=row,
    )
    dispatch.select(NAME, problem, a.backend).launch(
        a.q_rope,
        a.kv,
        a.freqs,
        a.gamma,
        a.layer,
        a.page_table,
        a.kv_lens,
        starts,
        epsilon=a.epsilon,
        rope=a.rope,
        power_of_two_scales=a.power_of_two_scales,
        q_rope_out=q_rope_out,
    )
    return (q_rope_out,)


def check_rope(dims: Dims, rope: str, epsilon: float) -> None:
    """The choices that go with a layer's weights."""
    dims.require(dims.finite("epsilon", epsilon) >= 0, "epsilon", "not be negative", epsilon)
    dims.require(rope in ROPES, "rope", f"be one of {', '.join(ROPES)}", repr(rope))


def _check_positions(dims: Dims, a: AppendArguments, q_starts: Tensor, before: list[int]) -> None:
    """Every new token has a row in the page table and an angle in freqs."""
    after = [low + new for low, new in zip(before, q_starts.diff().tolist(), strict=True)]
    check_used_rows(dims, a.page_table, a.layer, before, after)
    for request, (low, high) in enumerate(zip(before, after, strict=True)):
        dims.require(
            high == low or high <= dims["positions"],
            "freqs",
            f"have a row for position {high - 1} of request {request}",
            f"{dims['positions']} rows",
        )


def _empty(a: AppendArguments) -> tuple[Tensor]:
    return (a.q_rope.new_empty(a.q_rope.shape),)


OP = Op(NAME, AppendArguments, _append, _empty, ("q_rope_out",))
