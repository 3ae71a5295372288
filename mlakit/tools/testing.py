"""Compares results with a float64 oracle, row by row, with a derived tolerance.

A row is the last axis. A norm over the whole tensor misses errors: six of 32 768 rows may be zero
and the cosine is still perfect. So every row has its own tolerance, derived from the error of a
naive run in the same precision on that row. There are also helpers to poison memory that must not
be read, to shuffle page tables, and to check that nothing else was written.

Nothing here imports pytest; a failure is an AssertionError that names the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from mlakit.dispatch.reprs import shapes_repr

# A correct kernel rounds twice in the stored type: P, then the result. A step that stores partial
# results and merges them rounds three times.
STORED_ROUNDINGS, MERGED_ROUNDINGS = 2.0, 3.0
# It accumulates in float32: a sum of about a thousand terms and the exponential of a score of a few
# tens lose some tens of roundings. TF32 loses 8192 and bfloat16 65 536: both exceed the tolerance.
ACCUMULATED_ROUNDINGS = 256.0

NORMS = ("largest", "root mean square")

NEVER_A_PAGE = torch.iinfo(torch.int32).max


def assert_matches(
    name: str,
    actual: Tensor,
    exact: Tensor,
    naive: Tensor,
    *,
    factor: float = 2.0,
    roundings: float = STORED_ROUNDINGS,
) -> None:
    """Assert that every row of `actual` matches `exact` within the tolerance of its precision.

        |actual - exact| ≤ max(factor · |naive - exact| + |store(exact) - exact|, floor)   per row

    in two norms over the row: the largest element finds one wrong number; the root mean square
    finds a small error common to the row (every element 1 % too large), which is below the rounding
    of the largest element.

    actual [..., D] floating, the result to check
    exact  [..., D] float64, the oracle's result, not rounded
    naive  [..., D] floating, the oracle in the precision of the kernel (float32 for a kernel that
           accumulates in float32); rounded to the type of `actual` here. A less precise run gives a
           larger tolerance: a softmax all in bfloat16 is wrong by 1 to 2 %.

    NaN, +inf and -inf must be where they are in `exact`. A row that is 0 in `exact` and in `naive`
    must be exactly 0 (no visible keys).

    `floor` is needed because `naive` may be accurate on a row by chance, and its error alone would
    then reject a correct kernel:

        floor = roundings · u · |row|  +  256 u32 · max(|row|, |typical row|)   0 for a zero row

    with u the unit roundoff of the type of `actual`, u32 that of the accumulator (float32, or
    float64 for a float64 result), |row| the norm of this row in `exact` and |typical row| the
    median over the rows. The first term is the roundings, two of every kernel. The second is the
    accumulation, whose error is proportional to the summed terms: a row that is small because its
    terms cancel (an lse near 0) keeps the absolute error of its neighbours.

    In a row of fewer than 64 columns the error of the naive run is too noisy. |naive - exact| then
    includes a share of the median over all rows: 4 times it for one column, half of it for 32, none
    from 64 on.
    """
    _check_arguments(name, actual, exact, naive)
    if actual.numel() == 0:
        return
    want = _rows(exact.detach())
    got = _rows(actual.detach().to(want.device, torch.float64))
    plain = _rows(naive.detach().to(actual.dtype).to(want.device, torch.float64))
    finite = want.isfinite()
    largest = torch.finfo(actual.dtype).max
    stored = want.clamp(-largest, largest).to(actual.dtype).double()
    zero = torch.zeros((), dtype=torch.float64, device=want.device)
    size = torch.where(finite, want, zero)
    error = torch.where(finite, got - want, zero)
    plain_error = torch.where(finite, plain - want, zero)
    store_error = torch.where(finite, stored - want, zero)
    norms = zip(*(_norms(each) for each in (size, error, plain_error, store_error)), strict=True)
    norms_of_rows = []
    for label, (own, wrong, plain_loss, stored_loss) in zip(NORMS, norms, strict=True):
        plain_loss = _smoothed_loss(plain_loss, own > 0, columns=want.shape[-1])
        tolerance = torch.maximum(
            factor * plain_loss + stored_loss, _floor(own, actual.dtype, roundings)
        )
        norms_of_rows.append((label, wrong, tolerance))
    kinds = _kinds(want)
    fails = [
        _kinds(got) != kinds,
        _kinds(plain) != kinds,
        *(_exceeding(each) for each in norms_of_rows),
    ]
    # the only GPU sync, unless there is an error to report
    if bool(torch.stack([fail.any() for fail in fails]).any()):
        _check_patterns(name, got, want, exact.shape)
        _check_patterns(f"the naive run of {name}", plain, want, exact.shape)
        _check_rows(name, norms_of_rows, exact.shape)


def _check_arguments(name: str, actual: Tensor, exact: Tensor, naive: Tensor) -> None:
    for role, tensor in (("actual", actual), ("naive", naive)):
        if not tensor.is_floating_point():
            raise TypeError(
                f"{name}: {role} must be floating, got {tensor.dtype}; "
                "compare integers with assert_same_bits"
            )
    if exact.dtype != torch.float64:
        raise TypeError(f"{name}: exact must be float64, got {exact.dtype}")
    for role, tensor in (("actual", actual), ("naive", naive)):
        if tensor.shape != exact.shape:
            raise AssertionError(
                f"{name}: {role} has shape {tuple(tensor.shape)}, the oracle {tuple(exact.shape)}"
            )


def _rows(tensor: Tensor) -> Tensor:
    """[rows, columns]; a scalar is one row of one column."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim else tensor.reshape(1, 1)


def _norms(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The norms of each row, in the order of NORMS."""
    largest = rows.abs().amax(-1)
    # dividing by the largest first: the squares of subnormal results would be 0
    scaled = rows / torch.where(largest > 0, largest, 1.0)[:, None]
    return largest, largest * scaled.square().mean(-1).sqrt()


def _smoothed_loss(loss: Tensor, filled: Tensor, *, columns: int) -> Tensor:
    """The naive run's loss per row; for narrow rows combined with the median loss."""
    share = 0.5 * sqrt(max(64 / columns - 1, 0.0))
    if share == 0:
        return loss
    return torch.where(filled, torch.hypot(loss, share * _median(loss, filled)), loss)


def _median(sizes: Tensor, filled: Tensor) -> Tensor:
    """The median of the `filled` sizes; NaN if none is. Indexing would synchronise with the GPU."""
    return torch.where(filled, sizes, torch.nan).nanmedian()


def _floor(size: Tensor, dtype: torch.dtype, roundings: float) -> Tensor:
    """The minimum tolerance for rows of these sizes."""
    info = torch.finfo(dtype)
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    smallest_step = info.smallest_normal * info.eps
    storing = roundings * (info.eps * size).clamp_min(smallest_step) / 2
    summed = size.maximum(_median(size, size > 0))
    summing = ACCUMULATED_ROUNDINGS * torch.finfo(accumulator).eps / 2 * summed
    return torch.where(size > 0, storing + summing, 0.0)


def _kinds(rows: Tensor) -> Tensor:
    """0 for finite, 1 for NaN, 2 for +inf, 3 for -inf."""
    return rows.masked_fill(rows.isfinite(), 0.0).nan_to_num(nan=1.0, posinf=2.0, neginf=3.0)


def _exceeding(norms_of_rows: tuple[str, Tensor, Tensor]) -> Tensor:
    """The rows whose error exceeds their tolerance."""
    _, error, tolerance = norms_of_rows
    # not `error > tolerance`: NaN fails
    return ~(error <= tolerance)


def _check_patterns(name: str, got: Tensor, want: Tensor, shape: torch.Size) -> None:
    kinds: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
        ("NaN", torch.isnan),
        ("+inf", torch.isposinf),
        ("-inf", torch.isneginf),
    )
    for label, is_kind in kinds:
        differs = is_kind(got) != is_kind(want)
        if bool(differs.any()):
            row, column = (int(i) for i in differs.nonzero()[0])
            raise AssertionError(
                f"{name}: the {label} pattern differs from the oracle's in {int(differs.sum())} "
                f"elements, first at {_index(row, shape)} column {column}: "
                f"got {float(got[row, column])}, want {float(want[row, column])}"
            )


def _check_rows(
    name: str, norms_of_rows: list[tuple[str, Tensor, Tensor]], shape: torch.Size
) -> None:
    """`norms_of_rows`: for each norm its name, the errors and the tolerances of the rows."""
    fails = torch.stack([_exceeding(each) for each in norms_of_rows])
    excess = torch.stack([error / tolerance for _, error, tolerance in norms_of_rows])
    excess = torch.where(fails, excess.nan_to_num(nan=torch.inf), 0.0)
    norm, worst = divmod(int(excess.argmax()), fails.shape[1])
    label, error, tolerance = norms_of_rows[norm]
    raise AssertionError(
        f"{name}: {int(fails.any(0).sum())} of {len(error)} rows are wrong, "
        f"worst {_index(worst, shape)}: {label} error {float(error[worst]):.3e} exceeds its "
        f"tolerance {float(tolerance[worst]):.3e}"
    )


def _index(row: int, shape: torch.Size) -> str:
    """Row number `row` as an index into the leading axes of a tensor of `shape`."""
    index: list[int] = []
    for size in reversed(shape[:-1]):
        row, place = divmod(row, size)
        index.insert(0, place)
    return f"row {index}"


def poison(tensor: Tensor, keep: Tensor | None = None) -> Tensor:
    """Fill `tensor` in place with values that must never reach a result, except the rows in `keep`.

    Floats become NaN, bytes 0xFF (NaN as e4m3, bfloat16 or float32), other integers their largest
    value, which is no valid page, row or position.

    tensor [*leading, ...]
    keep   [*leading] bool, the rows to keep; None poisons everything
    """
    bits = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    if tensor.dtype.itemsize == 1:
        worst: float = 0xFF
    elif tensor.dtype == torch.uint32:  # torch 2.11 has no arithmetic for it
        bits, worst = tensor.view(torch.int32), -1
    elif tensor.is_floating_point():
        worst = torch.nan
    else:
        worst = torch.iinfo(tensor.dtype).max
    if keep is None:
        bits.fill_(worst)
        return tensor
    kept = _over_leading_axes("poison", keep, tensor)
    bits.copy_(torch.where(kept, bits, torch.full_like(bits, worst)))
    return tensor


def _over_leading_axes(caller: str, rows: Tensor, tensor: Tensor) -> Tensor:
    """`rows`, bool over the leading axes of `tensor`, in a shape that broadcasts over `tensor`."""
    if rows.dtype != torch.bool or rows.shape != tensor.shape[: rows.ndim]:
        raise ValueError(
            f"{caller}: rows must be bool over the leading axes of {tuple(tensor.shape)}, "
            f"got {rows.dtype} {tuple(rows.shape)}"
        )
    return rows.reshape(rows.shape + (1,) * (tensor.ndim - rows.ndim)).to(tensor.device)


def shuffled_pages(
    batch: int,
    pages_per_request: int | Sequence[int],
    num_pages: int,
    generator: torch.Generator,
) -> Tensor:
    """A page table int32 [batch, max_pages] of distinct random pages below `num_pages`.

    Entries past a request's last page are `NEVER_A_PAGE`.
    """
    counts = (
        [pages_per_request] * batch
        if isinstance(pages_per_request, int)
        else list(pages_per_request)
    )
    if len(counts) != batch:
        raise ValueError(f"shuffled_pages: {len(counts)} page counts for a batch of {batch}")
    if sum(counts) > num_pages:
        raise ValueError(f"shuffled_pages: {sum(counts)} pages needed, the pool has {num_pages}")
    pages = torch.randperm(num_pages, generator=generator, device=generator.device).int()
    table = pages.new_full((batch, max([0, *counts])), NEVER_A_PAGE)
    taken = 0
    for request, count in enumerate(counts):
        table[request, :count] = pages[taken : taken + count]
        taken += count
    return table


def _differing_elements(a: Tensor, b: Tensor) -> Tensor:
    """Bool in the shape of `a`. Compares bits: NaN equals itself, -0 differs from 0."""
    a_bytes, b_bytes = _bytes(a), _bytes(b)
    return (a_bytes != b_bytes.to(a_bytes.device)).any(-1)


def _bytes(tensor: Tensor) -> Tensor:
    """uint8, with one more axis."""
    return tensor.detach().contiguous().unsqueeze(-1).view(torch.uint8)


def _check_bits(name: str, differs: Tensor) -> None:
    if bool(differs.any()):
        rows = _rows(differs).any(-1)
        first = _index(int(rows.nonzero()[0]), differs.shape)
        raise AssertionError(f"{name}: {int(rows.sum())} of {len(rows)} rows differ, first {first}")


def assert_same_bits(name: str, actual: Tensor, expected: Tensor) -> None:
    """Assert equal shape, dtype and bits: for two runs of one kernel, for copies, for integers."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{name}: got {actual.dtype} {tuple(actual.shape)}, "
            f"want {expected.dtype} {tuple(expected.shape)}"
        )
    _check_bits(name, _differing_elements(actual, expected))


@dataclass(frozen=True)
class Snapshot:
    """Tensors and copies of their contents."""

    tensors: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]

    __repr__ = shapes_repr


def snapshot(**tensors: Tensor) -> Snapshot:
    """Copy `tensors` for `assert_unchanged`.

    Only the elements of a view are copied; pass its base to include the gaps of its strides.
    """
    return Snapshot(tensors, {name: tensor.detach().clone() for name, tensor in tensors.items()})


def assert_unchanged(before: Snapshot, *, written: Mapping[str, Tensor] | None = None) -> None:
    """Assert that nothing was written since `before`, except to the rows given in `written`.

    written  by name, bool over the leading axes of that tensor: rows that may change
    """
    written = written or {}
    unknown = [name for name in written if name not in before.tensors]
    if unknown:
        raise ValueError(f"assert_unchanged: the snapshot has no {unknown[0]}")
    for name, tensor in before.tensors.items():
        if torch.equal(_bytes(tensor), _bytes(before.copies[name])):
            continue  # cheaper than locating the differences
        differs = _differing_elements(tensor, before.copies[name])
        if name in written:
            differs &= ~_over_leading_axes("assert_unchanged", written[name], tensor)
        _check_bits(f"{name} was written to", differs)
