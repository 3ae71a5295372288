"""Absorbed attention over an explicit list of cache rows per query token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.dispatch import selection
from mlakit.dispatch.checks import Dims
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.reprs import shapes_repr
from mlakit.dispatch.specs import Problem, Use, device_facts, num_sms
from mlakit.kernels.arguments import SparseArguments
from mlakit.ops._checks import (
    check_absorbed_query,
    check_layer,
    check_result,
    check_row_lists,
    check_sink,
    check_stored,
    result_dtype,
)
from mlakit.ops._library import op
from mlakit.plan import EvenSplit

NAME = "sparse_mla"


class ExtraRows(NamedTuple):
    """A second cache that every query attends to as well, with row lists of its own."""

    cache: PagedLatentCache
    rows: Tensor  # [tokens, extra_topk]
    topk_lens: Tensor | None = None  # [tokens]
    layer: int = 0

    def __repr__(self) -> str:
        return shapes_repr(self)


def sparse_mla(
    q: Tensor,
    cache: PagedLatentCache,
    rows: Tensor,
    *,
    softmax_scale: float,
    q_rope: Tensor | None = None,
    q_scale: Tensor | None = None,
    topk_lens: Tensor | None = None,
    sink: Tensor | None = None,
    extra: ExtraRows | tuple[PagedLatentCache, Tensor] | None = None,
    layer: int = 0,
    plan: EvenSplit | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_logits: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of every query token over the rows its own list names; prefill and decode alike.

    q          [tokens, heads, D_C + D_R] bf16, fp16, float32 or e4m3: absorbed and rotated. With
               q_rope it is the absorbed part alone, [tokens, heads, D_C]
    q_rope     [tokens, heads, D_R] in q's dtype: the rotated part
    q_scale    [tokens] float32, multiplies q (for e4m3 queries)
    rows       [tokens, topk] int32 physical rows, page · page_size + offset; a negative or too
               large one does not count, a repeated one counts each time
    topk_lens  [tokens] int32: list entries from here on do not count; None: all may
    sink       [heads] float32 logit that joins out's denominator only
    max_logits [tokens, heads] float32 to write the largest logits to, as out and lse
    extra      a second cache with its own lists, attended together with the first
    plan       how many parts a list is attended in; never changes a result beyond rounding

    Returns out [tokens, heads, v_width] in q's dtype (bf16 for e4m3), lse and max_logits
    [tokens, heads] float32; where nothing counts, out is 0 and both others −inf.
    """
    if not (plan is None or isinstance(plan, EvenSplit)):
        raise TypeError(f"{NAME}: plan must be an EvenSplit, got {type(plan).__name__}")
    second = None if extra is None else _extra_rows(extra)
    extra_layer = (
        None if second is None else check_layer(NAME, second.cache, second.layer, owner="extra.")
    )
    arguments = SparseArguments(
        q=q,
        layer=check_layer(NAME, cache, layer),
        rows=rows,
        q_rope=q_rope,
        q_scale=q_scale,
        topk_lens=topk_lens,
        extra=extra_layer,
        extra_rows=None if second is None else second.rows,
        extra_topk_lens=None if second is None else second.topk_lens,
        splits=plan,
        softmax_scale=softmax_scale,
        sink=sink,
        backend=backend,
    )
    return _sparse(arguments, out, lse, max_logits)


def _extra_rows(extra: object) -> ExtraRows:
    if not isinstance(extra, tuple) or not 2 <= len(extra) <= 4:
        got = type(extra).__name__
        raise TypeError(f"{NAME}: extra must be ExtraRows or (cache, rows, …), got {got}")
    return ExtraRows(*extra)


def _empty(a: SparseArguments) -> tuple[Tensor, Tensor, Tensor]:
    shape = a.q.shape[:2]
    out = a.q.new_empty(*shape, a.layer.codec.row.v_width, dtype=result_dtype(a.q))
    lse, max_logits = (a.q.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return out, lse, max_logits


@op(NAME, fake=_empty)
def _sparse(
    a: SparseArguments, out: Tensor | None, lse: Tensor | None, max_logits: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dims = Dims(NAME)
    check_absorbed_query(dims, a.q, a.q_rope, a.layer)
    check_stored(dims, a.layer)
    if a.q_scale is not None:
        dims.match("q_scale", a.q_scale, "tokens", dtypes=[torch.float32])
    check_row_lists(dims, "rows", a.rows, "topk_lens", a.topk_lens)
    if a.extra is not None:
        check_stored(dims, a.extra, "extra.cache")
        row, main = a.extra.codec.row, a.layer.codec.row
        dims.require(row == main, "extra.cache", f"have rows like the cache's, {main}", row)
        rows = dims.tensor("extra.rows", a.extra_rows)
        check_row_lists(dims, "extra.rows", rows, "extra.topk_lens", a.extra_topk_lens)
    check_sink(dims, a.sink)
    scale = dims.finite("softmax_scale", a.softmax_scale)
    dims.bind("v_width", a.layer.codec.row.v_width, "the cache's value width")
    axes = ("tokens", "heads", "v_width")
    out = check_result(dims, "out", out, *axes, dtype=result_dtype(a.q))
    lse = check_result(dims, "lse", lse, *axes[:2], dtype=torch.float32)
    max_logits = check_result(dims, "max_logits", max_logits, *axes[:2], dtype=torch.float32)

    problem = Problem(
        *device_facts(a.q.device),
        dtype=str(a.q.dtype),
        format=a.layer.codec.name,
        heads=dims["heads"],
        page_size=a.layer.page_size,
        row=a.layer.codec.row,
        uses=tuple(_uses(a)),
        num_tokens=a.q.shape[0],
        num_sms=num_sms(a.q.device),
        has_extra=a.extra is not None,
    )
    selection.select(NAME, problem, a.backend).launch(
        a._replace(softmax_scale=scale), out, lse, max_logits
    )
    return out, lse, max_logits


def _uses(a: SparseArguments) -> Iterator[Use]:
    if a.extra is not None and a.extra.codec.name != a.layer.codec.name:
        yield Use.OTHER_EXTRA_FORMAT
    if a.extra is not None and a.extra.codec.is_split:
        yield Use.SPLIT_EXTRA
    layers = [a.layer] if a.extra is None else [a.layer, a.extra]
    tensors = (tensor for layer in layers for tensor in (layer.payload, layer.rope))
    if not all(_is_aligned(each) for each in tensors if each is not None):
        yield Use.UNALIGNED_CACHE
    elif any(_has_uneven_pages(each.payload) for each in layers):
        yield Use.UNEVEN_PAGES
    if a.q_scale is not None:
        yield Use.Q_SCALE
    if a.q_rope is not None:
        yield Use.Q_ROPE if a.q_rope.dtype == a.q.dtype else Use.OTHER_Q_ROPE
    if not all(_is_aligned(each) for each in (a.q, a.q_rope) if each is not None):
        yield Use.UNALIGNED_QUERY


def _is_aligned(rows: Tensor) -> bool:
    """Return whether each row of [n, m, columns] is at a multiple of 16 bytes.

    The hardware copies such rows. The stride of an axis of size 1 does not matter, that of another
    one is not 0, which TMA refuses.
    """
    size = rows.element_size()
    strides = [stride for stride, n in zip(rows.stride()[:2], rows.shape[:2], strict=True) if n > 1]
    return rows.data_ptr() % 16 == 0 and all(
        stride > 0 and stride * size % 16 == 0 for stride in strides
    )


def _has_uneven_pages(rows: Tensor) -> bool:
    """Return whether no row of [pages, page_size, columns] is at some multiple of a row's distance
    from the same row of the next page."""
    num_pages, page_size, _ = rows.shape
    return num_pages > 1 and page_size > 1 and rows.stride(0) % rows.stride(1) != 0
