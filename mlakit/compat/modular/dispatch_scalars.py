"""`compute_mla_dispatch_scalars`: MAX's number of KV splits (num_partitions) for its B200 kernels.

The number of splits changes no result beyond rounding, only the occupancy of the GPU. It equals
MAX's exactly, because callers store it (`scalar_args_buf`), compare it and use it as a key of
captured graphs. mlakit's own kernels use `mlakit.plan.split_heuristic`.

    L       keys of the longest request         pages  = ceil(L / page), page 64 or 128
    ctas    CTAs of a launch without splits     target = splits that fill the GPU about once

The number is rounded up to one of a few buckets, because MAX compiles one merge kernel per number.
It may exceed the number of pages; the surplus splits are empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from numbers import Integral

import torch
from torch import Tensor

from mlakit.dispatch.checks import Dims
from mlakit.plan.split_heuristic import ceil_div

BUCKETS = (1, 2, 3, 4, 8, 9, 16, 18, 20, 32, 37, 64, 72)
HEADS_PER_GROUP = 64

# Sparse cost model, fitted by MAX: the overhead of a split, in gathered rows.
ROWS_PER_SPLIT_OVERHEAD = 187
MAX_VERIFY_TOKENS = 8


def compute_mla_dispatch_scalars(
    batch_size: int,
    max_cache_length: int,
    q_max_seq_len: int,
    num_heads: int,
    *,
    sm_count: int,
    is_fp8_kv: bool = False,
    indices_stride: int | None = None,
) -> Tensor:
    """Return [batch_size, q_max_seq_len, num_partitions], int64 on the CPU: a `scalar_args_buf`.

    max_cache_length  tokens of the longest request before this step
    indices_stride    top-k of sparse attention; None: dense

    Supports any head count. Without requests or queries the number is 1. Raises ValueError for a
    negative argument and TypeError for one that is not an integer.
    """
    _at_least("batch_size", batch_size, 0)
    _at_least("max_cache_length", max_cache_length, 0)
    _at_least("q_max_seq_len", q_max_seq_len, 0)
    _at_least("num_heads", num_heads, 1)
    _at_least("sm_count", sm_count, 1)
    if indices_stride is not None:
        _at_least("indices_stride", indices_stride, 0)
    splits = num_partitions(
        batch_size,
        max_cache_length,
        q_max_seq_len,
        num_heads,
        sm_count=sm_count,
        is_fp8_kv=is_fp8_kv,
        indices_stride=indices_stride,
    )
    return torch.tensor([batch_size, q_max_seq_len, splits], dtype=torch.int64, device="cpu")


def _at_least(argument: str, value: object, minimum: int) -> None:
    dims = Dims("compute_mla_dispatch_scalars")
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{dims.op}: {argument} must be an integer, got {value!r}")
    must = f"be at least {minimum}" if minimum else "not be negative"
    dims.require(int(value) >= minimum, argument, must, value)


def num_partitions(
    batch_size: int,
    max_cache_length: int,
    q_max_seq_len: int,
    num_heads: int,
    *,
    sm_count: int,
    is_fp8_kv: bool = False,
    indices_stride: int | None = None,
    window: int | None = None,
    _cost_model: bool = True,
) -> int:
    """KV splits per request; arguments as in `compute_mla_dispatch_scalars`.

    `window` is the width of a causal sliding window. Sparse means the case that MAX tuned: the same
    top-k for every token, no sinks and no second cache. `_cost_model=False` uses the rule for one
    head group for speculative verification over sparse rows.
    """
    if batch_size == 0 or q_max_seq_len == 0:
        return 1
    keys = max_cache_length + q_max_seq_len
    sparse_fp8 = indices_stride is not None and is_fp8_kv
    is_verify = (
        sparse_fp8
        and 1 < q_max_seq_len <= MAX_VERIFY_TOKENS
        and num_heads * q_max_seq_len <= HEADS_PER_GROUP
    )
    is_short_topk = (
        sparse_fp8
        and q_max_seq_len == 1
        and batch_size <= 8
        and indices_stride == 2048
        and 1024 <= max_cache_length <= 2048
    )
    if indices_stride is not None:
        keys = min(indices_stride, keys) if is_short_topk else indices_stride
    if window is not None:
        keys = min(keys, _window_keys(window, q_max_seq_len, batch_size))
    # MAX's tests of sparse verification assume pages of 64: with the dense rule, 2048 rows would be
    # 16 pages, and one request of 6 tokens would get 16 splits instead of 20.
    page = 64 if is_verify or (keys <= 512 and batch_size >= 32) else 128
    launch = Launch(batch_size, keys, q_max_seq_len, num_heads, page, sm_count, is_fp8_kv)
    if is_verify and _cost_model:
        return cheapest_sparse_split(launch)
    if launch.head_groups == 1:
        return one_head_group(launch, min_pages=1 if is_short_topk else 4)
    return several_head_groups(launch)


def _window_keys(window: int, q_max_seq_len: int, batch_size: int) -> int:
    # without the 2048 keys, a large batch with a short window would get one split
    keys = window + q_max_seq_len
    return max(keys, 2048) if batch_size >= 64 else keys


@dataclass(frozen=True)
class Launch:
    """The sizes of a decode call: `keys` per request, in pages of `page` keys."""

    batch: int
    keys: int
    q_len: int
    num_heads: int
    page: int
    sm_count: int
    is_fp8: bool

    @property
    def pages(self) -> int:
        return ceil_div(self.keys, self.page)

    @property
    def head_groups(self) -> int:
        return ceil_div(self.num_heads, HEADS_PER_GROUP)

    @property
    def unfolded_ctas(self) -> int:
        """CTAs per split with one CTA per query token and head group."""
        return self.head_groups * self.q_len * self.batch

    @property
    def half_sms(self) -> int:
        """Half the SMs, an upper bound of the splits."""
        return max(self.sm_count // 2, 1)

    @property
    def max_splits(self) -> int:
        return max(min(self.half_sms, self.pages), 1)

    def target(self, ctas: int, fill_percent: int) -> int:
        """Splits for about one wave: rounded down if that fills `fill_percent` of the GPU."""
        rounded_down = self.sm_count // ctas
        is_filled = rounded_down * ctas * 100 >= self.sm_count * fill_percent
        if rounded_down and is_filled:
            return min(rounded_down, self.half_sms)
        return min(ceil_div(self.sm_count, ctas), self.half_sms)

    def clamp_to_bucket(self, splits: int, minimum: int) -> int:
        splits = min(max(splits, minimum), self.max_splits)
        return next(bucket for bucket in self.buckets() if bucket >= splits)

    def buckets(self) -> tuple[int, ...]:
        """The allowed numbers of splits, ascending; the last is `half_sms`."""
        return (*(bucket for bucket in BUCKETS if bucket < self.half_sms), self.half_sms)


def one_head_group(launch: Launch, min_pages: int = 4) -> int:
    """Return the splits of up to 64 heads: one wave, with at least `min_pages` pages per split."""
    # query tokens of a request share a CTA if all their heads fit its 64 rows
    folds = launch.q_len > 1 and launch.num_heads * launch.q_len <= HEADS_PER_GROUP
    ctas = launch.batch if folds else launch.unfolded_ctas
    is_short = launch.batch >= 64 and launch.keys <= (512 if launch.is_fp8 else 256)
    is_nearly_full = ctas * 100 >= launch.sm_count * 80
    minimum = 1 if is_short or is_nearly_full or launch.pages < 2 else 2
    splits = min(launch.target(ctas, fill_percent=85), launch.pages // min_pages)
    return launch.clamp_to_bucket(splits, minimum)


def several_head_groups(launch: Launch) -> int:
    """Return the splits of more than 64 heads: whole waves of CTAs, at most 32 pages per split."""
    ctas = launch.unfolded_ctas
    if ctas >= launch.sm_count:
        return 1
    target = launch.target(ctas, fill_percent=90)
    quantum = min(launch.sm_count // gcd(ctas, launch.sm_count), launch.half_sms)
    if launch.batch >= 16 or 4 <= launch.batch <= 8:
        quantum = min(quantum, target)
    waves = ceil_div(ceil_div(launch.pages, 32), quantum)
    splits = min(waves * quantum, launch.pages // _min_pages_of_groups(launch))
    if launch.batch >= 64 and launch.keys <= 2176:
        # merging this many short requests costs more than splitting gains: no minimum
        return launch.clamp_to_bucket(splits, minimum=1)
    return launch.clamp_to_bucket(max(target, splits), minimum=1 if launch.pages < 2 else 2)


def _min_pages_of_groups(launch: Launch) -> int:
    if launch.batch >= 64:
        pages = 16 if launch.is_fp8 else 8
    elif launch.is_fp8 and launch.batch > 8:
        pages = 8
    else:
        pages = 4
    # tuned for two groups; with many groups the quotient would be 0
    return max(pages * 2 // launch.head_groups, 1) * 2


def cheapest_sparse_split(launch: Launch) -> int:
    """Speculative verification over top-k rows: the bucket with the smallest modelled time,

        waves · (overhead + rows per split),   waves = ceil(ctas · splits / SMs)

    A larger number must be more than 2 % cheaper than the best smaller one.
    """
    best, best_cost = 1, _sparse_cost(launch, 1)
    for splits in launch.buckets():
        cost = _sparse_cost(launch, splits)
        if splits <= launch.max_splits and cost * 100 < best_cost * 98:
            best, best_cost = splits, cost
    return best


def _sparse_cost(launch: Launch, splits: int) -> int:
    waves = ceil_div(launch.unfolded_ctas * splits, launch.sm_count)
    return waves * (ROWS_PER_SPLIT_OVERHEAD + ceil_div(launch.keys, splits))
