"""How many parts the keys of a decode batch are cut into: the policy of MAX for its B200 kernels.

A count of parts never changes a result beyond rounding, only how full the GPU is. It is kept to the
letter, because callers store it (`scalar_args_buf`), compare it and key captured graphs by it.

    L       keys of the longest request     pages  = ceil(L / page), page 64 or 128
    ctas    thread blocks of an unsplit launch     target = parts that fill the GPU about once

Every count is one of a few buckets, for MAX compiles one merge kernel per count. Rounding up to a
bucket may give more parts than pages; the surplus parts are empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from numbers import Integral

import torch
from torch import Tensor

from mlakit.checks import Dims

BUCKETS = (1, 2, 3, 4, 8, 9, 16, 18, 20, 32, 37, 64, 72)
HEADS_PER_GROUP = 64

# Sparse cost model, fitted by MAX: a part costs as much as gathering this many more rows.
ROWS_PER_PART_OVERHEAD = 187
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
    """[batch_size, q_max_seq_len, num_partitions], int64 on the CPU: a `scalar_args_buf`.

    max_cache_length  tokens of the longest request before this step
    indices_stride    width of the top-k lists of sparse attention; None: dense

    Any head count from 1 up. No requests or no queries need 1 part. Raises ValueError for a
    negative argument and TypeError for one that is not an integer.
    """
    _at_least("batch_size", batch_size, 0)
    _at_least("max_cache_length", max_cache_length, 0)
    _at_least("q_max_seq_len", q_max_seq_len, 0)
    _at_least("num_heads", num_heads, 1)
    _at_least("sm_count", sm_count, 1)
    if indices_stride is not None:
        _at_least("indices_stride", indices_stride, 0)
    parts = num_partitions(
        batch_size,
        max_cache_length,
        q_max_seq_len,
        num_heads,
        sm_count=sm_count,
        is_fp8_kv=is_fp8_kv,
        indices_stride=indices_stride,
    )
    return torch.tensor([batch_size, q_max_seq_len, parts], dtype=torch.int64, device="cpu")


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
    """Parts the keys of every request are cut into; arguments as `compute_mla_dispatch_scalars`.

    `window` is the width of a causal sliding window. Sparse means here the same number of top-k
    rows for every token, no sinks and no second cache: the case MAX tuned. `_cost_model=False`
    sizes a sparse verify by the rule for one head group.
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
    # The values pinned for a sparse verify are for pages of 64: with the dense rule, 2048 rows were
    # 16 pages, and one request of 6 tokens would get 16 parts where 20 are pinned.
    page = 64 if is_verify or (keys <= 512 and batch_size >= 32) else 128
    launch = Launch(batch_size, keys, q_max_seq_len, num_heads, page, sm_count, is_fp8_kv)
    if is_verify and _cost_model:
        return cheapest_sparse_split(launch)
    if launch.head_groups == 1:
        return one_head_group(launch, min_pages=1 if is_short_topk else 4)
    return several_head_groups(launch)


def _window_keys(window: int, q_max_seq_len: int, batch_size: int) -> int:
    # a large batch over a short window would fall to one part; 2048 keys keep it out of that rule
    keys = window + q_max_seq_len
    return max(keys, 2048) if batch_size >= 64 else keys


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@dataclass(frozen=True)
class Launch:
    """What the policy knows of a decode call: `keys` per request, in pages of `page` keys."""

    batch: int
    keys: int
    q_len: int
    num_heads: int
    page: int
    sm_count: int
    is_fp8: bool

    @property
    def pages(self) -> int:
        return _ceil_div(self.keys, self.page)

    @property
    def head_groups(self) -> int:
        return _ceil_div(self.num_heads, HEADS_PER_GROUP)

    @property
    def unfolded_ctas(self) -> int:
        """Thread blocks of one part when every query token has its own."""
        return self.head_groups * self.q_len * self.batch

    @property
    def half(self) -> int:
        """Half the SMs: never more parts than this."""
        return max(self.sm_count // 2, 1)

    @property
    def most_parts(self) -> int:
        return max(min(self.half, self.pages), 1)

    def target(self, ctas: int, fill_percent: int) -> int:
        """Parts for about one wave: rounded down if that already fills the GPU well enough."""
        below = self.sm_count // ctas
        filled = below * ctas * 100 >= self.sm_count * fill_percent
        return min(below if below and filled else _ceil_div(self.sm_count, ctas), self.half)

    def clamp_to_bucket(self, parts: int, least: int) -> int:
        parts = min(max(parts, least), self.most_parts)
        return next(bucket for bucket in self.buckets() if bucket >= parts)

    def buckets(self) -> tuple[int, ...]:
        """The counts allowed, ascending; the last is `half`, so any clamped count rounds to one."""
        return (*(bucket for bucket in BUCKETS if bucket < self.half), self.half)


def one_head_group(launch: Launch, min_pages: int = 4) -> int:
    """Up to 64 heads: fill the GPU once, but give every part at least `min_pages` pages."""
    # several query tokens of a request share a thread block when all their heads fit its 64 rows
    folds = launch.q_len > 1 and launch.num_heads * launch.q_len <= HEADS_PER_GROUP
    ctas = launch.batch if folds else launch.unfolded_ctas
    is_short = launch.batch >= 64 and launch.keys <= (512 if launch.is_fp8 else 256)
    is_nearly_full = ctas * 100 >= launch.sm_count * 80
    least = 1 if is_short or is_nearly_full or launch.pages < 2 else 2
    parts = min(launch.target(ctas, fill_percent=85), launch.pages // min_pages)
    return launch.clamp_to_bucket(parts, least)


def several_head_groups(launch: Launch) -> int:
    """More than 64 heads: whole waves of thread blocks, at most 32 pages to a part."""
    ctas = launch.unfolded_ctas
    if ctas >= launch.sm_count:
        return 1
    target = launch.target(ctas, fill_percent=90)
    quantum = min(launch.sm_count // gcd(ctas, launch.sm_count), launch.half)
    if launch.batch >= 16 or 4 <= launch.batch <= 8:
        quantum = min(quantum, target)
    waves = _ceil_div(_ceil_div(launch.pages, 32), quantum)
    parts = min(waves * quantum, launch.pages // _min_pages_of_groups(launch))
    if launch.batch >= 64 and launch.keys <= 2176:
        # the merge of so many short requests costs more than the split gains: no lower bound at all
        return launch.clamp_to_bucket(parts, least=1)
    return launch.clamp_to_bucket(max(target, parts), least=1 if launch.pages < 2 else 2)


def _min_pages_of_groups(launch: Launch) -> int:
    if launch.batch >= 64:
        pages = 16 if launch.is_fp8 else 8
    elif launch.is_fp8 and launch.batch > 8:
        pages = 8
    else:
        pages = 4
    # tuned for two groups; with many groups the quotient would reach 0
    return max(pages * 2 // launch.head_groups, 1) * 2


def cheapest_sparse_split(launch: Launch) -> int:
    """Speculative verify over top-k rows: the bucket with the least modelled time,

        waves · (overhead + rows per part),   waves = ceil(ctas · parts / SMs)

    A larger count has to be more than 2 % cheaper than the best smaller one.
    """
    best, best_cost = 1, _sparse_cost(launch, 1)
    for parts in launch.buckets():
        cost = _sparse_cost(launch, parts)
        if parts <= launch.most_parts and cost * 100 < best_cost * 98:
            best, best_cost = parts, cost
    return best


def _sparse_cost(launch: Launch, parts: int) -> int:
    waves = _ceil_div(launch.unfolded_ctas * parts, launch.sm_count)
    return waves * (ROWS_PER_PART_OVERHEAD + _ceil_div(launch.keys, parts))
