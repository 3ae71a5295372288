"""What FlashMLA's test problems are made of, and its rule of comparison with its tolerances.

Everything a call must not read is poison: rows no query attends to, the rest of the last page, page
ids past a request's end, the padding between strides. The answers come from plain attention over
dequantised rows, in float64 or as a run in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlakit.tools.testing import poison

NOT_A_BLOCK = 2147480000
NOT_INDICES = (-(2**31), -123456, -1, 114514, 1919810, NOT_A_BLOCK, 2**31 - 1)
ENTRIES_AT_A_TIME = 2**20  # rows gathered at a time to answer


# --- the rule of comparison ---------------------------------------------------------------------


@dataclass(frozen=True)
class Tolerance:
    """Every element within `absolute` or `relative`, and all of them together within `cosine`."""

    absolute: float
    relative: float
    cosine: float = 1e-7


DENSE_OUT = Tolerance(8e-4, 2.01 / 128, 5e-6)
SPARSE_OUT = Tolerance(1e-3, 2.01 / 128, 5e-6)
PREFILL_OUT = Tolerance(8e-4, 3.01 / 128, 7e-6)
VARLEN_OUT = Tolerance(1e-3, 8.01 / 128, 7e-6)
DECODE_LSE = Tolerance(1e-6, 8.01 / 65536)
PREFILL_LSE = Tolerance(1e-6, 2.01 / 65536)


def assert_close(name: str, actual: Tensor, want: Tensor, tolerance: Tolerance) -> None:
    """FlashMLA's comparison: the same NaN and infinities, elements near, and a small angle.

    |a − w| < absolute  or  |a − w| / (|w| + 1e-6) < relative
    |1 − 2 Σ a·w / (Σ a² + Σ w²)| ≤ cosine
    """
    assert actual.shape == want.shape, f"{name}: {tuple(actual.shape)}, not {tuple(want.shape)}"
    a, w = actual.double(), want.double()
    for is_kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(is_kind(a), is_kind(w)), f"{name}: {is_kind.__name__} differs"
    infinite = ~w.isfinite()  # and equal, so no part of what follows
    a, w = a.masked_fill(infinite, 0.0), w.masked_fill(infinite, 0.0)
    error = (a - w).abs()
    near = (error < tolerance.absolute) | (error / (w.abs() + 1e-6) < tolerance.relative)
    assert bool(near.all()), f"{name}: {int((~near).sum())} off, worst {float(error.max()):.3e}"
    size = float((a * a).sum() + (w * w).sum())
    angle = abs(1 - 2 * float((a * w).sum()) / size) if size else 0.0
    assert angle <= tolerance.cosine, f"{name}: cosine difference {angle:.3e}"


# --- pieces of problems -------------------------------------------------------------------------


def padded(tensor: Tensor) -> Tensor:
    """The same values with poison between them: every axis has a stride larger than it needs."""
    *leading, last = tensor.shape
    base = tensor.new_empty([*(size + 1 for size in leading), last + 128])
    view = poison(base)[tuple(slice(size) for size in tensor.shape)]
    view.copy_(tensor)
    return view


def random_lengths(
    b: int, mean: int, least: int, *, varlen: bool, zeros: bool, generator: torch.Generator
) -> list[int]:
    """Lengths around `mean` with half of it as deviation; with `zeros`, about half are 0."""
    deviation = mean / 2 if varlen else 0.0
    drawn = mean + deviation * torch.randn(b, generator=generator)
    lengths = drawn.int().clamp_min(least) if varlen else torch.full((b,), mean)
    if zeros:
        lengths = torch.where(torch.randn(b, generator=generator) > 0, 0, lengths)
    return [int(length) for length in lengths]


def scattered_blocks(
    lengths: Sequence[int], page: int, align: int, generator: torch.Generator
) -> Tensor:
    """block_table [b, columns] of shuffled pages; every request has as many as the longest."""
    columns = max(-(-max([*lengths, 1]) // (align * page)), 1) * align
    shuffled = torch.randperm(len(lengths) * columns, generator=generator).int()
    return shuffled.view(len(lengths), columns)


def random_lists(limits: Tensor, topk: int, generator: torch.Generator) -> Tensor:
    """[tokens, topk] distinct numbers below each limit in random order; −1 where there are none."""
    width = max(topk, int(limits.max()))
    chance = torch.rand(len(limits), width, generator=generator, device=generator.device)
    position = torch.arange(width, device=generator.device)
    chance.masked_fill_(position >= limits[:, None], -1.0)
    chosen = chance.topk(topk, dim=1).indices
    return torch.where(chosen < limits[:, None], chosen, -1).int()


def random_sink(heads: int, generator: torch.Generator) -> Tensor:
    """About a third of the heads each: a number, +inf (nothing is left of out), −inf (no sink)."""
    device = generator.device
    sink = torch.randn(heads, generator=generator, device=device)
    kind = torch.randn(heads, generator=generator, device=device)
    return sink.masked_fill(kind > 0.5, torch.inf).masked_fill(kind < -0.5, -torch.inf)


def softmax_over(
    scores: Tensor,  # [..., queries, keys], −inf where a key is not seen
    values: Tensor,  # [..., keys, d_v], finite
    sink: Tensor | None = None,  # [queries]
) -> tuple[Tensor, Tensor]:
    """(out [..., queries, d_v], lse [..., queries]); +inf where nothing is seen."""
    lse = scores.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype).expand_as(lse))
    weights = (scores - total.masked_fill(total.isneginf(), 0.0).unsqueeze(-1)).exp()
    return weights @ values, lse.masked_fill(lse.isneginf(), torch.inf)


def listed_attention(
    q: Tensor,  # [tokens, heads, d]
    rows: Tensor,  # [tokens, entries, d], anything where not seen
    seen: Tensor,  # [tokens, entries] bool
    scale: float,
    d_v: int,
    sink: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out [tokens, heads, d_v], lse, max_logits [tokens, heads])."""
    rows = rows.to(dtype).masked_fill(~seen[:, :, None], 0.0)
    scores = (q.to(dtype) @ rows.mT) * scale
    scores = scores.masked_fill(~seen[:, None, :], -torch.inf)
    return *softmax_over(scores, rows[:, :, :d_v], sink), scores.amax(2)
