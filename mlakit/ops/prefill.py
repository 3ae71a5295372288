"""Expanded attention over ragged batches."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.dispatch import selection
from mlakit.dispatch.checks import E4M3, FLOATS, Dims
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.specs import Problem, Use, device_facts
from mlakit.formats import SCALE_BLOCK
from mlakit.kernels.arguments import PrefillArguments
from mlakit.model.masks import CAUSAL, Mask
from mlakit.ops._checks import INTEGERS, check_mask, check_result, check_sink, result_dtype
from mlakit.ops._library import op
from mlakit.plan import PrefillPlan

NAME = "mla_prefill"
TMA_BYTES = 16  # addresses, pitches and first columns of TMA tiles are multiples of it


def mla_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    q_starts: Tensor,
    kv_starts: Tensor,
    *,
    softmax_scale: float,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    keys_per_scale: int = 1,
    mask: Mask = CAUSAL,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    plan: PrefillPlan | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Multi-head attention with keys [k_nope of the head, k_rope shared by all heads].

        score = (q_n·k_n + q_r·k_r) · softmax_scale [+ slope · (key − query)]
        out   = softmax(score) @ v                                 lse = log Σ exp score

    q            [tokens, heads, D_N + D_R] bf16, fp16, float32 or e4m3: rotated queries
    k_nope       [keys, heads, D_N] in q's dtype; it, v and k_rope are read where they are, strided
                 and apart
    k_rope       [keys, D_R] in q's dtype, shared by all heads
    v            [keys, heads, D_V] in q's dtype: the values of each head
    q_starts     [batch + 1] int32: request b has queries q_starts[b] to q_starts[b + 1]. Rows after
                 q_starts[-1] are padding: not read, and left as they are in out and lse
    kv_starts    [batch + 1] int32: and these keys, of which its queries are the newest
    q_scale      [tokens, heads] float32, not negative; multiplies q (for e4m3 queries, with which
                 k_nope, k_rope and v are e4m3 too)
    k_scale      [keys] float32, multiplies k_nope and k_rope: k_rope is shared by all heads
    v_scale      [keys, heads] float32, multiplies v. e4m3 v may also have contiguous keys instead
                 of columns, as a transposed up-projection writes them
    keys_per_scale  1, or 128: k_scale [blocks] and v_scale [blocks, heads] then have one for each
                 128 keys of a request. Request b has those from kv_starts[b] // 128 + b on, of
                 keys // 128 + batch blocks; blocks without keys are not read
    alibi_slopes [heads] float32: slope of the bias by distance of each head
    sink         [heads] float32 logit that joins out's denominator only
    out, lse     to write to; on a GPU they share no memory with the other arguments

    Query i of q_len stands at position kv_len − q_len + i among kv_len keys. Returns
    out [tokens, heads, D_V] in q's dtype (bf16 for e4m3) and lse [tokens, heads] float32; where
    nothing was attended, out is 0 and lse −inf. `plan` is accepted and never changes a result.
    """
    check_mask(NAME, mask)
    arguments = PrefillArguments(
        q=q,
        k_nope=k_nope,
        k_rope=k_rope,
        v=v,
        q_starts=q_starts,
        kv_starts=kv_starts,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        keys_per_scale=keys_per_scale,
        softmax_scale=softmax_scale,
        mask=mask,
        alibi_slopes=alibi_slopes,
        sink=sink,
        backend=backend,
    )
    return _prefill(arguments, out, lse)


def _empty(a: PrefillArguments) -> tuple[Tensor, Tensor]:
    out = a.q.new_empty(*a.q.shape[:2], a.v.shape[2], dtype=result_dtype(a.q))
    return out, a.q.new_empty(a.q.shape[:2], dtype=torch.float32)


@op(NAME, fake=_empty)
def _prefill(a: PrefillArguments, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    dims = Dims(NAME)
    dims.match("q", a.q, "tokens", "heads", "D_N + D_R", dtypes=(*FLOATS, E4M3))
    dtype = (a.q.dtype,)
    dims.match("k_nope", a.k_nope, "keys", "heads", "D_N", dtypes=dtype)
    dims.match("k_rope", a.k_rope, "keys", "D_R", dtypes=dtype)
    dims.match("v", a.v, "keys", "heads", "D_V", dtypes=dtype)
    widths = dims["D_N"] + dims["D_R"]
    dims.require(
        widths == dims["D_N + D_R"],
        "q.shape[2]",
        f"equal the widths of k_nope and k_rope together, {widths}",
        dims["D_N + D_R"],
    )
    for name, tensor in (("q", a.q), ("k_nope", a.k_nope), ("k_rope", a.k_rope)):
        dims.rows_contiguous(name, tensor)
    if not (a.v.dtype == E4M3 and _has_contiguous_keys(a.v)):
        dims.rows_contiguous("v", a.v)
    dims.match("q_starts", a.q_starts, "batch + 1", dtypes=INTEGERS)
    dims.match("kv_starts", a.kv_starts, "batch + 1", dtypes=INTEGERS)
    total = (dims["tokens"], "the number of query tokens")
    dims.starts("q_starts", a.q_starts, *total, is_padded=True)
    dims.starts("kv_starts", a.kv_starts, dims["keys"], "the number of keys")
    keys_per_scale = _check_scales(dims, a)
    if a.alibi_slopes is not None:
        dims.match("alibi_slopes", a.alibi_slopes, "heads", dtypes=[torch.float32])
    check_sink(dims, a.sink)
    scale = dims.finite("softmax_scale", a.softmax_scale)
    axes = ("tokens", "heads", "D_V")
    out = check_result(dims, "out", out, *axes, dtype=result_dtype(a.q))
    lse = check_result(dims, "lse", lse, *axes[:2], dtype=torch.float32)

    a = a._replace(softmax_scale=scale, keys_per_scale=keys_per_scale)
    problem = prefill_problem(
        *(a.q, a.k_nope, a.k_rope, a.v),
        mask=a.mask,
        has_alibi=a.alibi_slopes is not None,
        key_scales=(a.k_scale, a.v_scale) if keys_per_scale == 1 else (),
    )
    selection.select(NAME, problem, a.backend).launch(a, out, lse)
    return out, lse


def prefill_problem(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    has_alibi: bool = False,
    key_scales: tuple[Tensor | None, ...] = (),
) -> Problem:
    """Describe a call to dispatch by the shapes, strides and dtypes of its tensors.

    key_scales  k_scale and v_scale, where each key may have its own
    """
    uses: list[Use] = []
    if has_alibi:
        uses.append(Use.ALIBI_SLOPES)
    if not _has_pitch(q):
        uses.append(Use.UNALIGNED_QUERY)
    if not (_has_pitch(k_nope) and _has_pitch(k_rope)):
        uses.append(Use.UNALIGNED_KEYS)
    if v.shape[2] > 1 and v.stride(2) != 1:
        uses.append(Use.CONTIGUOUS_KEYS)
    elif not _has_pitch(v):
        uses.append(Use.UNALIGNED_VALUES)
    if any(scale is not None and scale.numel() and scale.stride(0) for scale in key_scales):
        uses.append(Use.SCALES_OF_KEYS)
    return Problem(
        *device_facts(q.device),
        dtype=str(q.dtype),
        heads=q.shape[1],
        head_widths=(k_nope.shape[2], k_rope.shape[1], v.shape[2]),
        mask=mask.kind,
        uses=tuple(uses),
    )


def _check_scales(dims: Dims, a: PrefillArguments) -> int:
    """keys_per_scale"""
    keys_per_scale = dims.integer("keys_per_scale", a.keys_per_scale, minimum=1)
    allowed = (1, SCALE_BLOCK)
    dims.require(keys_per_scale in allowed, "keys_per_scale", "be 1 or 128", keys_per_scale)
    per_key = "keys" if keys_per_scale == 1 else "blocks"
    blocks = dims["keys"] // SCALE_BLOCK + dims["batch + 1"] - 1
    dims.bind("blocks", blocks, f"keys // {SCALE_BLOCK} + batch")
    scales = (
        ("q_scale", a.q_scale, ("tokens", "heads")),
        ("k_scale", a.k_scale, (per_key,)),
        ("v_scale", a.v_scale, (per_key, "heads")),
    )
    for name, scale, axes in scales:
        if scale is None:
            continue
        if a.q.dtype != E4M3:
            dims.fail(name, "be None unless q, k_nope, k_rope and v are e4m3", f"q of {a.q.dtype}")
        dims.match(name, scale, *axes, dtypes=[torch.float32])
    if a.q_scale is not None:
        dims.not_negative("q_scale", a.q_scale)
    return keys_per_scale


def _has_contiguous_keys(v: Tensor) -> bool:
    return v.shape[0] <= 1 or v.stride(0) == 1


def _has_pitch(rows: Tensor) -> bool:
    """Return whether TMA can address tiles of the rows [n, heads, columns] or [n, columns].

    The rows of each n must be adjacent, those of the next n behind them, and every row must begin
    at a multiple of 16 bytes. A head begins at a column of the descriptor: a load from a column
    that is not at a multiple of 16 bytes is an illegal instruction, which ends the CUDA context.
    """
    if rows.numel() == 0:
        return True
    itemsize = rows.element_size()
    if rows.data_ptr() % TMA_BYTES:
        return False
    span = 1
    for size, stride in zip(rows.shape[1:], rows.stride()[1:], strict=True):
        span += (size - 1) * stride
        if stride != 1 and size > 1 and stride * itemsize % TMA_BYTES:
            return False
    if rows.shape[0] == 1:
        return span < 2**31
    pitch = rows.stride(0)
    return span <= pitch and span < 2**31 and pitch * itemsize % TMA_BYTES == 0
