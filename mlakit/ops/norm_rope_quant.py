"""RoPE, RMSNorm, quantise and append: what a step does with its new tokens before attending."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mlakit.cache import UNSHARDED, PagedLatentCache, PageTable
from mlakit.cache.slot_checks import SKIPPED, check_slots_unique
from mlakit.dispatch import selection
from mlakit.dispatch.checks import E4M3, FLOATS, Dims, values_visible
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.specs import Problem, device_facts
from mlakit.kernels.arguments import AppendArguments
from mlakit.model.geometry import ROPES, Rope
from mlakit.ops._checks import (
    INTEGERS,
    as_shard,
    check_kv_lens,
    check_layer,
    check_page_table,
    check_query_starts,
    check_result,
    check_shard,
    check_stored,
    check_used_rows,
)
from mlakit.ops._library import op

NAME = "norm_rope_quant_append"


def norm_rope_quant_append(
    q_rope: Tensor,
    kv: Tensor,
    freqs: Tensor,
    gamma: Tensor | None,
    cache: PagedLatentCache,
    page_table: PageTable | None = None,
    kv_lens: Tensor | None = None,
    q_starts: Tensor | None = None,
    *,
    epsilon: float,
    layer: int = 0,
    rope: Rope = "interleaved",
    slots: Tensor | None = None,
    positions: Tensor | None = None,
    kv_shard: tuple[int, int, int] | None = None,
    q_rope_out: Tensor | None = None,
    power_of_two_scales: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Rotate the queries; rotate, normalise, quantise the new tokens' latents into the cache.

        q_rope' = R(position) q_rope      row = [ x · rsqrt(mean x² + ε) · γ , R(position) k_rope ]

    q_rope     [tokens, heads, D_R] bf16, fp16 or float32 queries, not rotated yet
    kv         [tokens, D_C + D_R] bf16, fp16 or float32: raw latents x, then the raw shared
               key k_rope
    freqs      [positions, D_R] bf16, fp16 or float32: cos0, sin0, cos1, sin1, …; the rotation
               rounds in this dtype, and its results, the stored key's too, are rounded to that of
               q_rope
    gamma      [D_C] bf16, fp16 or float32; the norm is float32, rounded to this dtype, then
               multiplied. None: x is stored as it is, without a norm; `epsilon` has no effect
    page_table as in `mla_decode`
    kv_lens    [batch] int32, as in `mla_decode`, tokens the cache holds once this step's are in it:
               new token i of a request with q_len of them is at position kv_len − q_len + i
    q_starts   [batch + 1] int32 rows of q per request; None means one new token each. Rows after
               q_starts[-1] are padding: not read, not stored, and not written in q_rope_out
    positions  [tokens] int32 or int64 row of freqs of each token, if it is not its position in the
               request; rows of the cache stay those of kv_lens. That of a token with slot −1 may be
               anything: outside of freqs, its query becomes 0
    rope       "interleaved" rotates pairs (0, 1), (2, 3), …; "half" pairs (p, p + D_R/2)
    kv_shard   (rank, world, interleave), as in `mla_decode`: only tokens at positions p with
               (p // interleave) % world == rank are stored, by the page table or the slots of this
               rank; all queries are rotated. kv_lens stays global
    q_rope_out [tokens, heads, D_R] bf16, fp16, float32 or e4m3 (saturating): where the rotated
               queries go, q_rope itself or a strided slice
    slots      [tokens] int32 or int64 row of each token, page · page_size + offset, in place of
               page_table, kv_lens and q_starts; `positions` must then be given. No two tokens have
               the same. −1: the token is not stored. With kv_shard, slots of tokens that other
               ranks store are not read

    Returns the rotated queries. Nothing but them and the new tokens' cache rows is written.

    Raises TypeError where both ways or neither are given. Raises ValueError, where the values are
    on the host, for a kv_len below the new tokens of its request, for rows outside of the cache,
    for two equal slots, and for tokens to store at positions outside of freqs.
    """
    arguments = AppendArguments(
        q_rope=q_rope,
        kv=kv,
        freqs=freqs,
        gamma=gamma,
        layer=check_layer(NAME, cache, layer),
        page_table=page_table,
        kv_lens=kv_lens,
        q_starts=q_starts,
        slots=slots,
        positions=positions,
        shard=UNSHARDED if kv_shard is None else as_shard(NAME, kv_shard),
        epsilon=epsilon,
        rope=rope,
        power_of_two_scales=power_of_two_scales,
        backend=backend,
    )
    (result,) = _append(arguments, q_rope_out)
    return result


def _empty(a: AppendArguments) -> tuple[Tensor]:
    return (a.q_rope.new_empty(a.q_rope.shape),)


@op(NAME, fake=_empty)
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
    if a.gamma is not None:
        dims.match("gamma", a.gamma, "latent", dtypes=FLOATS)
    check_stored(dims, a.layer)
    a.layer.check_writable(dims)
    check_rope(dims, a.rope, a.epsilon)
    check_shard(dims, a.shard)
    starts = _check_rows(dims, a)
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
    checked = a._replace(q_starts=starts, epsilon=float(a.epsilon))
    selection.select(NAME, problem, a.backend).launch(checked, q_rope_out)
    return (q_rope_out,)


def check_rope(dims: Dims, rope: str, epsilon: float) -> None:
    """The choices that go with a layer's weights."""
    dims.require(dims.finite("epsilon", epsilon) >= 0, "epsilon", "not be negative", epsilon)
    dims.require(rope in ROPES, "rope", f"be one of {', '.join(ROPES)}", repr(rope))


def _check_rows(dims: Dims, a: AppendArguments) -> Tensor | None:
    """Every new token has a row to be stored in and an angle; gives `q_starts` of page tables."""
    by_request = {"page_table": a.page_table, "kv_lens": a.kv_lens, "q_starts": a.q_starts}
    if a.positions is not None:
        dims.match("positions", a.positions, "tokens", dtypes=INTEGERS)
    if a.slots is not None:
        _refuse_both(dims, by_request)
        _check_slots(
            dims,
            a.slots,
            _given(dims, "positions", {"slots": a.slots, "positions": a.positions}),
            a,
        )
        return None
    if a.positions is not None and all(value is None for value in by_request.values()):
        raise TypeError(f"{dims.op}: slots must be given with positions, got None")
    page_table = _given(dims, "page_table", by_request)
    kv_lens = check_kv_lens(dims, _given(dims, "kv_lens", by_request))
    starts = check_query_starts(dims, a.q_starts, dims["tokens"], dims["batch"], is_padded=True)
    check_page_table(dims, page_table, dims["batch"])
    if kv_lens is not None:
        _check_places(dims, a, page_table, kv_lens, starts.diff().tolist())
    return starts


def _refuse_both(dims: Dims, by_request: Mapping[str, object]) -> None:
    for name, value in by_request.items():
        if value is not None:
            got = type(value).__name__
            raise TypeError(f"{dims.op}: {name} must be None where slots are given, got {got}")


def _given(dims: Dims, name: str, together: Mapping[str, Any]) -> Any:
    """Return the argument of this name, without which the others are of no use."""
    if together[name] is None:
        others = [other for other, value in together.items() if value is not None]
        why = f"with {' and '.join(others)}" if others else "with kv_lens, or slots with positions"
        raise TypeError(f"{dims.op}: {name} must be given {why}, got None")
    return together[name]


def _check_slots(dims: Dims, slots: Tensor, positions: Tensor, a: AppendArguments) -> None:
    dims.match("slots", slots, "tokens", dtypes=INTEGERS)
    if not (values_visible(slots) and values_visible(positions)):
        return
    rows, angles = a.layer.num_slots, dims["positions"]
    is_own = a.shard.owner(positions) == a.shard.rank
    outside = (is_own & ((slots < -1) | (slots >= rows))).nonzero()
    if len(outside):
        token = int(outside[0])
        dims.fail(f"slots[{token}]", f"be -1 or in [0, {rows})", int(slots[token]))
    check_slots_unique(dims, torch.where(is_own, slots, SKIPPED))
    outside = ((slots != -1) & ((positions < 0) | (positions >= angles))).nonzero()
    if len(outside):
        token = int(outside[0])
        must = f"be in [0, {angles}), the rows of freqs, or its slot -1"
        dims.fail(f"positions[{token}]", must, int(positions[token]))


def _check_places(
    dims: Dims, a: AppendArguments, page_table: PageTable, kv_lens: list[int], q_lens: list[int]
) -> None:
    """Every new token has a row in the page table and an angle in freqs."""
    dims.new_tokens_counted(kv_lens, q_lens)
    lengths = list(zip(kv_lens, q_lens, strict=True))
    before = [a.shard.local_count(kv_len - q_len) for kv_len, q_len in lengths]
    after = [a.shard.local_count(kv_len) for kv_len in kv_lens]
    check_used_rows(dims, page_table, a.layer, before, after)
    angles = dims["positions"]
    if a.positions is None:
        check_angles(dims, a.freqs, kv_lens, q_lens)
    elif values_visible(a.positions):
        for token, position in enumerate(a.positions[: sum(q_lens)].tolist()):
            must = f"be in [0, {angles}), the rows of freqs"
            dims.require(0 <= position < angles, f"positions[{token}]", must, position)


def check_angles(dims: Dims, freqs: Tensor, kv_lens: Sequence[int], q_lens: Sequence[int]) -> None:
    """Every new token has an angle in freqs."""
    angles = freqs.shape[0]
    for request, (kv_len, q_len) in enumerate(zip(kv_lens, q_lens, strict=True)):
        must = f"have a row for position {kv_len - 1} of request {request}"
        dims.require(q_len == 0 or kv_len <= angles, "freqs", must, f"{angles} rows")
