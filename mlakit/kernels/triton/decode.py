"""Absorbed MLA attention of each request's newest tokens over its paged cache, portable Triton.

Maths      s = q·row · softmax_scale [· q_scale];  out = softmax(s) @ row[:, :v_width]
Work       queries × heads of a request are packed into tiles of `block_m` rows; a tile of rows with
           all its keys is a *pair*. Without a plan the pairs are laid end to end on one line of key
           tiles, which is cut into as many equal runs as fill the device; where whole pairs are
           nearly as even nothing is cut. Every program finds its stretch of the line from the
           lengths. A plan, an even split and deterministic=True give the cuts instead. A second,
           small kernel merges the pairs that were cut.
Memory     a tile of keys is read once for all rows of a pair, as K and as V. Scratch: float32
           partials of `block_m` rows, at most 2 per run; with given cuts one for each part that a
           request may have
Limits     none; widths are padded to powers of two. A number that is not finite, in a key that only
           some queries of a request see, reaches the others that share a tile of rows with it
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlakit.cache import CacheLayer, KVShard, PageTable
from mlakit.kernels.triton.configs import (
    DecodeConfig,
    RowTiles,
    pick_decode_config,
    pick_merge_config,
)
from mlakit.kernels.triton.launch import Target, launch, target
from mlakit.kernels.triton.primitives import (
    add_rope_values,
    add_values,
    fold_states,
    load_query,
    load_row_tile,
    mask_interval,
    merged_state,
    score_keys,
    softmax_step,
    softmax_totals,
)
from mlakit.masks import Mask
from mlakit.plan import DecodePlanTensors, EvenSplit

SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal
TRITON_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
PLAIN = (torch.bfloat16, torch.float16, torch.float32)
SPLIT_KEYS = 2048  # keys of a part where the result may not depend on the batch
SMALL_SCRATCH_BYTES = 64 * 2**20  # partials of a plan that are always given room


def mla_decode(
    q_latent: Tensor,  # [tokens, heads, D_C]
    q_rope: Tensor,  # [tokens, heads, D_R]
    q_scale: Tensor | None,  # [tokens] float32: q = stored q · q_scale
    layer: CacheLayer,
    page_table: PageTable,
    q_starts: Tensor,  # [batch + 1]
    kv_lens: Tensor,  # [batch] cached tokens, these queries included, on all ranks together
    *,
    shard: KVShard,
    splits: DecodePlanTensors | EvenSplit | None,
    softmax_scale: float,
    mask: Mask,
    sink: Tensor | None,  # [heads] float32
    deterministic: bool,
    out: Tensor,  # [tokens, heads, v_width]
    lse: Tensor,  # [tokens, heads] float32
) -> None:
    tokens, heads, _ = q_latent.shape
    if tokens == 0 or heads == 0:
        return
    device = target(q_latent.device)
    types = compute_types(q_latent, q_rope, layer)
    tiles = row_tiles(layer)
    is_fixed = deterministic or isinstance(splits, DecodePlanTensors)
    batch = kv_lens.shape[0]
    config = pick_decode_config(
        tiles,
        # the tile of rows shows in the last bits: a fixed one depends on no other request
        rows=heads if is_fixed else heads * triton.cdiv(tokens, batch),
        format=layer.codec.name,
        itemsize=types.latent.itemsize,
        shared_bytes=device.shared_bytes,
        arch=device.arch,
    )
    schedule = _schedule(splits, deterministic, config, device, layer, page_table, out, batch)
    if isinstance(splits, DecodePlanTensors) and splits.empty_requests.shape[0] > 0:
        out.zero_()  # no item of a plan writes these
        lse.fill_(-torch.inf)
    slots = (schedule.slots, config.block_m)
    partial_out = torch.empty(*slots, out.shape[-1], dtype=torch.float32, device=out.device)
    partial_lse = torch.empty(slots, dtype=torch.float32, device=out.device)
    starts, table = page_table if isinstance(page_table, tuple) else (None, page_table)
    payload, scales, scale = _as_bytes(layer.payload), layer.scales, layer.tensor_scale
    host_scale = 1.0 if isinstance(scale, Tensor) else float(scale)
    lengths = (q_starts, kv_lens, q_starts.stride(0), kv_lens.stride(0))
    view = (heads, mask.window, *shard)
    cuts = (batch, schedule.runs, schedule.split_tiles, schedule.max_parts, schedule.slots)
    results = (out, lse, *out.stride()[:2], *lse.stride())
    constants = {
        "SCHEDULE": schedule.kind,
        "MASK": mask.kind,
        "IS_SHARDED": shard.world > 1,
        "V_WIDTH": tiles.v_width,
        "BM": config.block_m,
        "BN": config.block_n,
        "SCAN": 256 if batch <= 256 else 1024,
        "MIN_TILES": config.min_tiles,
    }
    launch(
        _mla_decode_kernel,
        (schedule.programs,),
        _as_bytes(q_latent),
        _as_bytes(q_rope),
        q_scale,
        payload,
        scales,
        table,
        starts,
        sink,
        scale.to(payload.device) if isinstance(scale, Tensor) else None,
        *lengths,
        *results,
        partial_out,
        partial_lse,
        *schedule.plan,
        # a scale of 0 would turn the −inf of a hidden key into NaN
        max(abs(softmax_scale) * log2(e) * host_scale, SMALLEST_SCALE),
        host_scale,
        *view,
        *cuts,
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        0 if q_scale is None else q_scale.stride(0),
        payload.stride(0),
        0 if scales is None else scales.stride(0),
        *((0, table.stride(0)) if starts is not None else table.stride()),
        0 if starts is None else starts.stride(0),
        0 if sink is None else sink.stride(0),
        FORMAT=layer.codec.name,
        DTYPE=TRITON_TYPES[types.latent],
        ROPE_DTYPE=TRITON_TYPES[types.rope],
        D_C=tiles.d_c,
        D_R=tiles.d_r,
        PIECES=tiles.pieces,
        WIDTH=tiles.width,
        VALUE_PIECES=tiles.value_pieces,
        ROPE_WIDTH=tiles.rope_width,
        VALUE_UNIT=value_unit(types.latent, layer.codec.name),
        PAGE=layer.page_size,
        STRIDE_ROW=payload.stride(1),
        STRIDE_SCALES_ROW=0 if scales is None else scales.stride(1),
        IS_NEGATIVE=softmax_scale < 0,
        HAS_FP8=device.has_fp8,
        IS_ALIGNED=rows_are_aligned(layer),
        IS_Q_PACKED=_is_packed(q_latent) and _is_packed(q_rope),
        IS_OUT_PACKED=_is_packed(out) and _is_packed(lse),
        IS_UNCHAINED=config.is_unchained,
        **constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if schedule.slots == 0:
        return
    merge = pick_merge_config(v_width=tiles.v_width)
    rows = min(merge.rows, config.block_m)
    launch(
        _merge_pairs_kernel,
        (schedule.merges, config.block_m // rows),
        partial_out,
        partial_lse,
        sink,
        *lengths,
        *results,
        schedule.plan[-1],
        *view,
        *cuts,
        0 if sink is None else sink.stride(0),
        COLUMNS=triton.next_power_of_2(tiles.v_width),
        ROWS=rows,
        **constants,
        num_warps=merge.num_warps,
    )


@dataclass(frozen=True)
class ComputeTypes:
    latent: torch.dtype  # of dots over latent columns, and of the weights of values
    rope: torch.dtype


def compute_types(q_latent: Tensor, q_rope: Tensor, layer: CacheLayer) -> ComputeTypes:
    """Types that hold q and the rows exactly; float32 where the two have different halves."""
    stored = layer.payload.dtype
    is_bytes = stored not in PLAIN
    latent = stored if not is_bytes else q_latent.dtype
    latent = latent if latent in PLAIN else torch.bfloat16
    stored_rope = stored
    if is_bytes:
        stored_rope = torch.float8_e4m3fn if layer.codec.name == "fp8" else torch.bfloat16
    exact = {dtype for dtype in (stored_rope, q_rope.dtype) if dtype in PLAIN} or {latent}
    return ComputeTypes(latent, exact.pop() if len(exact) == 1 else torch.float32)


def row_tiles(layer: CacheLayer) -> RowTiles:
    row = layer.codec.row
    return RowTiles.of(layer.codec.name, row.kv_lora_rank, row.qk_rope_head_dim, row.v_width)


def value_unit(dtype: torch.dtype, format: str) -> float:
    """Weights times the scales of rows: halves underflow where rows are small.

    A row that a half can hold has scales of at most 146, so the product stays below 65504.
    """
    is_scaled = format in ("fp8_token", "fp8_block128")
    return 256.0 if is_scaled and dtype == torch.float16 else 1.0


def rows_are_aligned(layer: CacheLayer) -> bool:
    """Do halves and floats among the bytes of a row lie at multiples of 4?"""
    payload = layer.payload
    bytes_at = (payload.data_ptr(), *payload.stride()[:2])
    return payload.dtype != torch.uint8 or all(at % 4 == 0 for at in bytes_at)


def _is_packed(tensor: Tensor) -> bool:
    """Does [tokens, heads, ...] have its (token, head) rows at one distance?"""
    return tensor.stride(0) == tensor.shape[1] * tensor.stride(1)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


@dataclass(frozen=True)
class Schedule:
    kind: str  # "balanced", "fixed" or "planned"
    programs: int
    merges: int  # pairs (balanced: places between runs) that are looked at
    slots: int  # partials of one tile of rows
    runs: int = 1  # balanced: equal parts of the line
    split_tiles: int = 0  # fixed: key tiles of a part; 0: max_parts alike
    max_parts: int = 1  # fixed: most parts of a pair
    plan: tuple[Tensor | None, ...] = (None, None, None)  # items, worker and partial starts


def _schedule(
    splits: DecodePlanTensors | EvenSplit | None,
    deterministic: bool,
    config: DecodeConfig,
    device: Target,
    layer: CacheLayer,
    page_table: PageTable,
    out: Tensor,
    batch: int,
) -> Schedule:
    """Who does what, in numbers that are known without looking at the lengths."""
    tokens, heads, v_width = out.shape
    max_pairs = min(tokens * heads // config.block_m + batch, tokens * heads)
    if isinstance(splits, DecodePlanTensors):
        num_items = splits.items.shape[0]
        # all queries may be those of one request, with all splits: room for that is given while it
        # is small, and else for twice what requests of like size need
        most = num_items * triton.cdiv(tokens * heads, config.block_m)
        alike = 2 * num_items * triton.cdiv(triton.cdiv(tokens, batch) * heads, config.block_m)
        small = SMALL_SCRATCH_BYTES // (4 * config.block_m * v_width)
        slots = min(most, max(alike, small)) if num_items > 1 else 0
        plan = (splits.items, splits.worker_starts, splits.partial_starts)
        return Schedule("planned", plan[1].shape[0] - 1, max_pairs, slots, plan=plan)
    if isinstance(splits, EvenSplit) or deterministic:
        if isinstance(splits, EvenSplit):
            split_tiles, parts = 0, splits.num_splits
        else:
            split_tiles = max(SPLIT_KEYS // config.block_n, 1)
            # one tile more: a window may begin inside one
            parts = triton.cdiv(_capacity(page_table, layer) // config.block_n + 2, split_tiles)
        programs = max_pairs * parts
        slots = programs if parts > 1 else 0
        return Schedule(
            "fixed", programs, max_pairs, slots, split_tiles=split_tiles, max_parts=parts
        )
    runs = device.num_sms * config.programs_per_sm
    return Schedule("balanced", runs + max_pairs, runs - 1, 2 * runs, runs=runs)


def _capacity(page_table: PageTable, layer: CacheLayer) -> int:
    """Keys that a request may have."""
    if isinstance(page_table, tuple):
        return page_table[1].shape[0]
    return page_table.shape[1] * layer.page_size


# On the device. `view` is (heads, window, rank, world, interleave); `lengths` is (q_starts,
# kv_lens) with their strides. Functions of a request take a number or a block of them.


@triton.jit
def _local_count(position, view, IS_SHARDED: tl.constexpr):
    """How many of the positions [0, position) are cached here."""
    count = position
    if IS_SHARDED:
        _, _, rank, world, interleave = view
        period = world * interleave
        rest = tl.maximum(position % period - rank * interleave, 0)
        count = position // period * interleave + tl.minimum(rest, interleave)
    return count


@triton.jit
def _seen_keys(query, q_len, kv_len, view, MASK: tl.constexpr, IS_SHARDED: tl.constexpr):
    """Local keys [first, last) that query `query` of a request sees; both grow with `query`."""
    IS_SLIDING: tl.constexpr = MASK == "sliding_window_causal" or MASK == "sliding_window_noncausal"
    IS_CHUNKED: tl.constexpr = MASK == "chunked" or MASK == "chunked_causal"
    IS_CAUSAL: tl.constexpr = (
        MASK == "causal" or MASK == "sliding_window_causal" or MASK == "chunked_causal"
    )
    first, last = mask_interval(
        kv_len - q_len + query, kv_len, view[1], IS_CAUSAL, IS_SLIDING, IS_CHUNKED
    )
    return _local_count(first, view, IS_SHARDED), _local_count(last, view, IS_SHARDED)


@triton.jit
def _load_lengths(lengths, request, mask):
    """int32 (first query, queries, keys) of requests; no queries outside `mask`."""
    q_starts, kv_lens, stride_q_starts, stride_kv_lens = lengths
    at = request.to(tl.int64)
    first = tl.load(q_starts + at * stride_q_starts, mask=mask, other=0).to(tl.int32)
    last = tl.load(q_starts + (at + 1) * stride_q_starts, mask=mask, other=0).to(tl.int32)
    kv_len = tl.load(kv_lens + at * stride_kv_lens, mask=mask, other=0).to(tl.int32)
    return first, last - first, kv_len


@triton.jit
def _pairs_of(
    q_len, kv_len, view, MASK: tl.constexpr, IS_SHARDED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """(pairs, first key tile, key tiles of each pair) of requests.

    A pair has one key tile at least: rows that see nothing are written, too.
    """
    first, _ = _seen_keys(q_len * 0, q_len, kv_len, view, MASK, IS_SHARDED)
    _, last = _seen_keys(q_len - 1, q_len, kv_len, view, MASK, IS_SHARDED)
    first_tile = first // BN
    num_tiles = tl.maximum((last + BN - 1) // BN - first_tile, 1)
    return (q_len * view[0] + BM - 1) // BM, first_tile, num_tiles


@triton.jit
def _line_of(
    block, lengths, batch, view, MASK: tl.constexpr, IS_SHARDED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """int64 [SCAN] (pairs, key tiles of all of them) of requests from `block` on."""
    request = block + tl.arange(0, SCAN)
    _, q_len, kv_len = _load_lengths(lengths, request, request < batch)
    pairs, _, tiles = _pairs_of(q_len, kv_len, view, MASK, IS_SHARDED, BM, BN)
    pairs = pairs.to(tl.int64)
    return pairs, pairs * tiles


@triton.jit
def _measure(
    lengths, batch, view, MASK: tl.constexpr, IS_SHARDED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """int64 (pairs, key tiles of all pairs, key tiles of the longest one) of the batch."""
    num_pairs = tl.zeros((), tl.int64)
    total = tl.zeros((), tl.int64)
    longest = tl.zeros((), tl.int64)
    for block in range(0, batch, SCAN):
        pairs, tiles = _line_of(block, lengths, batch, view, MASK, IS_SHARDED, BM, BN, SCAN)
        num_pairs += tl.sum(pairs, 0)
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles // tl.maximum(pairs, 1), 0))
    return num_pairs, total, longest


@triton.jit
def _cut_line(
    runs, lengths, batch, view, MASK: tl.constexpr, IS_SHARDED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SCAN: tl.constexpr, MIN_TILES: tl.constexpr,
):  # fmt: skip
    """int64 (pairs, key tiles, runs) of the line; 0 runs where whole pairs are handed out."""
    num_pairs, total, longest = _measure(lengths, batch, view, MASK, IS_SHARDED, BM, BN, SCAN)
    # to cut pairs costs partials and a merge: not for a tenth of the time
    rounds = (num_pairs + runs - 1) // runs
    is_even = longest * rounds * runs * 10 <= total * 11
    num_runs = tl.minimum(tl.maximum(total // MIN_TILES, 1), runs)
    return num_pairs, total, tl.where(is_even, 0, num_runs)


@triton.jit
def _run_of(place, total, num_runs):
    """The run that a place on the line belongs to; run w begins at w · total // num_runs."""
    return ((place + 1) * num_runs - 1) // total


@triton.jit
def _find_request(
    position, is_pair, lengths, batch, view, MASK: tl.constexpr, IS_SHARDED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """(request, pairs before it, key tiles of these) where the line has pair or tile `position`."""
    pairs_before = tl.zeros((), tl.int64)
    tiles_before = tl.zeros((), tl.int64)
    block = tl.zeros((), tl.int32)
    pairs, tiles = _line_of(block, lengths, batch, view, MASK, IS_SHARDED, BM, BN, SCAN)  # [SCAN]
    # blocks of requests that end before the position
    passed = tl.where(is_pair, tl.sum(pairs, 0), tl.sum(tiles, 0))
    while (passed <= position) & (block + SCAN < batch):
        pairs_before += tl.sum(pairs, 0)
        tiles_before += tl.sum(tiles, 0)
        block += SCAN
        pairs, tiles = _line_of(block, lengths, batch, view, MASK, IS_SHARDED, BM, BN, SCAN)
        passed += tl.where(is_pair, tl.sum(pairs, 0), tl.sum(tiles, 0))
    places = tl.where(is_pair, pairs, tiles)
    is_before = tl.where(is_pair, pairs_before, tiles_before) + tl.cumsum(places, 0) <= position
    request = tl.minimum(block + tl.sum(is_before.to(tl.int32), 0), batch - 1)
    pairs_before += tl.sum(tl.where(is_before, pairs, 0), 0)
    return request, pairs_before, tiles_before + tl.sum(tl.where(is_before, tiles, 0), 0)


@triton.jit
def _slots_before(request, lengths, partial_starts, heads, BM: tl.constexpr, SCAN: tl.constexpr):
    """int64 (partial slots, pairs) of the requests before `request` in a plan."""
    slots = tl.zeros((), tl.int64)
    num_pairs = tl.zeros((), tl.int64)
    for block in range(0, request, SCAN):
        earlier = block + tl.arange(0, SCAN)
        _, q_len, _ = _load_lengths(lengths, earlier, earlier < request)
        pairs = ((q_len * heads + BM - 1) // BM).to(tl.int64)
        first = tl.load(partial_starts + earlier, mask=earlier < request, other=0)
        last = tl.load(partial_starts + earlier + 1, mask=earlier < request, other=0)
        slots += tl.sum(pairs * (last - first), 0)
        num_pairs += tl.sum(pairs, 0)
    return slots, num_pairs


# A stretch is (request, tile of rows, first key, last key, slot): local keys [first, last) of a
# pair and the slot of their partial, −1 where they are all keys of the pair. A tile of rows −1 is
# nothing to do.


@triton.jit
def _balanced_stretch(
    program, cuts, lengths, view, MASK: tl.constexpr, IS_SHARDED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SCAN: tl.constexpr, MIN_TILES: tl.constexpr,
):  # fmt: skip
    """A whole pair; or what is between two neighbouring beginnings of runs and of pairs: program w
    has that from the beginning of run w on, program `runs` + p that from the beginning of pair p on
    unless a run begins there."""
    batch, runs, _, _, _ = cuts
    num_pairs, total, num_runs = _cut_line(
        runs, lengths, batch, view, MASK, IS_SHARDED, BM, BN, SCAN, MIN_TILES
    )
    is_cut = num_runs > 0
    is_run = is_cut & (program < runs)
    pair = program.to(tl.int64) - tl.where(is_cut, runs, 0)
    is_idle = tl.where(is_run, program >= num_runs, pair >= num_pairs)
    total = tl.maximum(total, 1)
    num_runs = tl.maximum(num_runs, 1)
    position = tl.where(is_run, program * total // num_runs, pair)
    request, pairs_before, tiles_before = _find_request(
        position, not is_run, lengths, batch, view, MASK, IS_SHARDED, BM, BN, SCAN
    )
    _, q_len, kv_len = _load_lengths(lengths, request, request >= 0)
    _, first_tile, num_tiles = _pairs_of(q_len, kv_len, view, MASK, IS_SHARDED, BM, BN)
    row_tile = tl.where(is_run, (position - tiles_before) // num_tiles, pair - pairs_before)
    pair_start = tiles_before + row_tile * num_tiles
    start = tl.where(is_run, position, pair_start)
    run = tl.where(is_run, program, _run_of(start, total, num_runs))
    is_idle = is_idle | (is_cut & (not is_run) & (run * total // num_runs == start))
    run_stop = tl.where(is_cut, (run + 1) * total // num_runs, pair_start + num_tiles)
    stop = tl.minimum(run_stop, pair_start + num_tiles)
    first_key = (first_tile + (start - pair_start).to(tl.int32)) * BN
    last_key = (first_tile + (stop - pair_start).to(tl.int32)) * BN
    slot = tl.where(stop - start < num_tiles, 2 * run + tl.where(is_run, 0, 1), -1)
    return request, tl.where(is_idle, -1, row_tile).to(tl.int32), first_key, last_key, slot


@triton.jit
def _parts_of(num_tiles, split_tiles, max_parts):
    """(parts, key tiles of each but the last) of a pair; cut by nothing but its own length."""
    even = (num_tiles + max_parts - 1) // max_parts
    part_tiles = tl.where(split_tiles > 0, split_tiles, even)
    return (num_tiles + part_tiles - 1) // part_tiles, part_tiles


@triton.jit
def _fixed_stretch(
    program, cuts, lengths, view, MASK: tl.constexpr, IS_SHARDED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """One part of one pair."""
    batch, _, split_tiles, max_parts, _ = cuts
    pair = (program // max_parts).to(tl.int64)
    part = program % max_parts
    request, pairs_before, _ = _find_request(
        pair, True, lengths, batch, view, MASK, IS_SHARDED, BM, BN, SCAN
    )
    _, q_len, kv_len = _load_lengths(lengths, request, request >= 0)
    pairs, first_tile, num_tiles = _pairs_of(q_len, kv_len, view, MASK, IS_SHARDED, BM, BN)
    parts, part_tiles = _parts_of(num_tiles, split_tiles, max_parts)
    row_tile = (pair - pairs_before).to(tl.int32)
    row_tile = tl.where((row_tile < pairs) & (part < parts), row_tile, -1)
    first_key = (first_tile + part * part_tiles) * BN
    last_key = (first_tile + tl.minimum((part + 1) * part_tiles, num_tiles)) * BN
    return request, row_tile, first_key, last_key, tl.where(parts > 1, program, -1).to(tl.int64)


@triton.jit
def _planned_stretch(
    item, row_tile, partial_starts, num_slots, lengths, heads, BM: tl.constexpr, SCAN: tl.constexpr
):
    """One tile of rows of one item of the plan, and whether it is the last one."""
    request = tl.load(item)
    first_key = tl.load(item + 1)
    last_key = tl.load(item + 2)
    item_slot = tl.load(item + 3)
    _, q_len, _ = _load_lengths(lengths, request, request >= 0)
    num_row_tiles = (q_len * heads + BM - 1) // BM
    slot = tl.full((), -1, tl.int64)
    if item_slot >= 0:
        first_slot = tl.load(partial_starts + request)
        parts = tl.load(partial_starts + request + 1) - first_slot
        slots_before, _ = _slots_before(request, lengths, partial_starts, heads, BM, SCAN)
        has_room = slots_before + num_row_tiles.to(tl.int64) * parts <= num_slots
        own_slot = slots_before + row_tile.to(tl.int64) * parts + (item_slot - first_slot)
        slot = tl.where(has_room, own_slot, -1)
        # without room its first item does all of the request
        first_key = tl.where(has_room, first_key, 0)
        last_key = tl.where(has_room, last_key, 0x7FFFFFFF)
        num_row_tiles = tl.where(has_room | (item_slot == first_slot), num_row_tiles, 0)
    is_last = row_tile + 1 >= num_row_tiles
    row_tile = tl.where(row_tile < num_row_tiles, row_tile, -1)
    return (request, row_tile, first_key, last_key, slot), is_last


@triton.jit
def _store_columns(places, slot, is_row, values, FIRST: tl.constexpr, LAST: tl.constexpr):
    """values [rows, n] as the columns from FIRST on, before LAST."""
    out_at, partial_at = places
    column = FIRST + tl.arange(0, values.shape[1])
    mask = is_row[:, None] & (column < LAST)[None, :]
    if slot < 0:
        at = out_at[:, None] + column[None, :]
        tl.store(at, values.to(out_at.dtype.element_ty), mask=mask)
    else:
        tl.store(partial_at[:, None] + column[None, :], values, mask=mask)


@triton.jit
def _row_at(rows_at, heads, stride_token, stride_head, BM: tl.constexpr, IS_PACKED: tl.constexpr):
    """int64 [BM] offsets of a tile of rows, those past the last one not to be used.

    IS_PACKED  (token, head) rows lie at one distance: without divisions, whose results would be
               kept in registers while keys are attended to
    """
    q_first, first_row, last_row = rows_at
    if IS_PACKED:
        first = q_first.to(tl.int64) * heads + first_row
        at = first * stride_head + tl.arange(0, BM).to(tl.int64) * stride_head
    else:
        row = tl.minimum(first_row + tl.arange(0, BM), last_row)
        token = (q_first + row // heads).to(tl.int64)
        at = token * stride_token + (row % heads).to(tl.int64) * stride_head
    return at


@triton.jit
def _load_queries(
    rows, is_row, D_C: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
    DTYPE: tl.constexpr, HAS_FP8: tl.constexpr,
):  # fmt: skip
    """Latent columns of queries, a tuple of PIECES [rows, WIDTH]."""
    q = ()
    for piece in tl.static_range(PIECES):
        q += (load_query(rows, is_row, piece * WIDTH, WIDTH, D_C, DTYPE, HAS_FP8),)
    return q


@triton.jit
def _find_entries(table, starts, request, strides):
    """Where the page ids (flat: the slots) of a request begin."""
    stride_request, stride_entry, stride_starts = strides
    request = request.to(tl.int64)
    if starts is None:
        first = request * stride_request
    else:
        first = tl.load(starts + request * stride_starts).to(tl.int64) * stride_entry
    return table + first


@triton.jit
def _load_pages(
    entries, tile, end, stride_entry, BN: tl.constexpr, PAGE: tl.constexpr, IS_FLAT: tl.constexpr
):
    """The page of a tile, or where it has several the page (flat: the slot) of each key, int32."""
    if not IS_FLAT and PAGE % BN == 0:
        column = tl.zeros((), tl.int64) + tile // (PAGE // BN)
        pages = tl.load(entries + column * stride_entry, mask=tile * BN < end, other=0)
    else:
        key = tile * BN + tl.arange(0, BN)
        # earlier keys of the tile than those attended to have entries, if of no page
        column = (key if IS_FLAT else key // PAGE).to(tl.int64)
        pages = tl.load(entries + column * stride_entry, mask=key < end, other=0)
    return pages.to(tl.int32)


@triton.jit
def _find_rows(
    pool, pages, tile, stride_page, STRIDE_ROW: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr,
    IS_FLAT: tl.constexpr,
):  # fmt: skip
    """Pointers [BN] to what a pool [pages, PAGE, n], or None, holds of the keys of a tile."""
    offset = tl.arange(0, BN)
    if pool is None:
        rows = None
    elif IS_FLAT:
        rows = pool + (pages // PAGE * stride_page + pages % PAGE * STRIDE_ROW)
    elif PAGE % BN == 0:
        # offsets within a tile are constants: they take no registers
        first = pages * stride_page + (tile % (PAGE // BN)) * (BN * STRIDE_ROW)
        rows = pool + first + offset * STRIDE_ROW
    else:
        in_page = (tile * BN + offset) % PAGE
        rows = pool + (pages * stride_page + in_page.to(tl.int64) * STRIDE_ROW)
    return rows


@triton.jit
def _is_between(key, first, last, HAS_FIRST: tl.constexpr):
    inside = key < last
    if HAS_FIRST:
        inside = inside & (key >= first)
    return inside


@triton.jit
def _row_signs(q_scale, tokens, stride_q_scale, IS_NEGATIVE: tl.constexpr):
    """What multiplies scores beside the scale, [rows, 1] or a number; None where nothing does."""
    signs = None
    if q_scale is not None:
        signs = tl.load(q_scale + tokens.to(tl.int64) * stride_q_scale)[:, None]
        if IS_NEGATIVE:
            signs = -signs
    elif IS_NEGATIVE:
        signs = -1.0
    return signs


@triton.jit
def _mask_scores(scores, signs, key, low, high, HAS_LOW: tl.constexpr):
    """Scores times `signs`, −inf where a row does not see a key."""
    if signs is not None:
        scores *= signs
    is_seen = _is_between(key[None, :], low[:, None], high[:, None], HAS_LOW)
    return tl.where(is_seen, scores, -float("inf"))


@triton.jit
def _softmax_step(scores, peak, exp_sum, scale_log2, end, IS_UNCHAINED: tl.constexpr):
    """`softmax_step`; IS_UNCHAINED hides from the compiler that its weights feed another dot.

    It would give every group of four warps all rows of the scores, as 64 rows can be shared by four
    warps only: eight warps would compute all scores twice. The scores are scaled already then.
    """
    if IS_UNCHAINED:
        decay = peak
        if end > 0:  # always so where there is a key
            scores, decay, peak, exp_sum = softmax_step(scores, peak, exp_sum, 1.0)
    else:
        scores, decay, peak, exp_sum = softmax_step(scores, peak, exp_sum, scale_log2)
    return scores, decay, peak, exp_sum


@triton.jit
def _no_values(BM: tl.constexpr, WIDTH: tl.constexpr, VALUE_PIECES: tl.constexpr):
    """A tuple of sums over no latent columns."""
    weighted = ()
    for _ in tl.static_range(VALUE_PIECES):
        weighted += (tl.zeros([BM, WIDTH], tl.float32),)
    return weighted


@triton.jit
def _attend(
    stretch, queries, q_strides, pools, page_strides, table, starts, table_strides, lengths, view,
    sink, stride_sink, results, partials, scale_log2, tensor_scale,
    SCHEDULE: tl.constexpr, MASK: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr, D_C: tl.constexpr, D_R: tl.constexpr, V_WIDTH: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, VALUE_PIECES: tl.constexpr,
    ROPE_WIDTH: tl.constexpr, VALUE_UNIT: tl.constexpr, PAGE: tl.constexpr,
    STRIDE_ROW: tl.constexpr, STRIDE_SCALES_ROW: tl.constexpr, IS_SHARDED: tl.constexpr,
    IS_NEGATIVE: tl.constexpr, HAS_FP8: tl.constexpr, IS_ALIGNED: tl.constexpr,
    IS_Q_PACKED: tl.constexpr, IS_OUT_PACKED: tl.constexpr, IS_UNCHAINED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of a stretch; write results, or a partial."""
    request, row_tile, first_key, last_key, slot = stretch
    q_latent, q_rope, q_scale = queries
    stride_q_token, stride_q_head, stride_rope_token, stride_rope_head, stride_q_scale = q_strides
    payload, scales = pools
    heads = view[0]
    HAS_LOW: tl.constexpr = SCHEDULE == "planned" or (MASK != "null" and MASK != "causal")
    IS_FLAT: tl.constexpr = starts is not None
    ROPE_COLUMNS: tl.constexpr = ROPE_WIDTH if V_WIDTH > D_C else 0
    ROPE_UNIT: tl.constexpr = VALUE_UNIT if FORMAT == "fp8_token" else 1.0

    # rows of the tile, (query, head) pairs; those past the last one stand for it
    q_first, q_len, kv_len = _load_lengths(lengths, request, request >= 0)
    first_row = row_tile * BM
    last_row = tl.minimum(first_row + BM, q_len * heads) - 1
    rows_at = (q_first, first_row, last_row)
    is_row = first_row + tl.arange(0, BM) <= last_row
    query = tl.minimum(first_row + tl.arange(0, BM), last_row) // heads
    low, high = _seen_keys(query, q_len, kv_len, view, MASK, IS_SHARDED)
    low = tl.maximum(low, first_key)  # [BM]
    high = tl.minimum(high, last_key)
    begin, _ = _seen_keys(first_row // heads, q_len, kv_len, view, MASK, IS_SHARDED)
    _, end = _seen_keys(last_row // heads, q_len, kv_len, view, MASK, IS_SHARDED)
    begin = tl.maximum(begin, first_key)
    end = tl.minimum(end, last_key)

    q_rows = q_latent + _row_at(rows_at, heads, stride_q_token, stride_q_head, BM, IS_Q_PACKED)
    q = _load_queries(q_rows, is_row, D_C, PIECES, WIDTH, DTYPE, HAS_FP8)
    q_rotated = None
    if ROPE_WIDTH > 0:
        q_rows = q_rope + _row_at(
            rows_at, heads, stride_rope_token, stride_rope_head, BM, IS_Q_PACKED
        )
        q_rotated = load_query(q_rows, is_row, 0, ROPE_WIDTH, D_R, ROPE_DTYPE, HAS_FP8)
    signs = _row_signs(q_scale, q_first + query, stride_q_scale, IS_NEGATIVE)
    peak = tl.full([BM], -float("inf"), tl.float32)
    exp_sum = tl.zeros([BM], tl.float32)
    weighted = _no_values(BM, WIDTH, VALUE_PIECES)
    if ROPE_COLUMNS > 0:
        rotated = tl.zeros([BM, ROPE_COLUMNS], tl.float32)
    entries = _find_entries(table, starts, request, table_strides)
    stride_entry = table_strides[1]
    tile = begin // BN
    last_tile = (end + BN - 1) // BN - 1
    # pages are looked up two tiles ahead: the loads of rows then wait for no other load (the cast
    # in the loop is needed: a value that is handed on untouched would keep it from being pipelined)
    pages = _load_pages(entries, tile, end, stride_entry, BN, PAGE, IS_FLAT).to(tl.int64)
    next_tile = tl.maximum(tl.minimum(tile + 1, last_tile), 0)
    next_pages = _load_pages(entries, next_tile, end, stride_entry, BN, PAGE, IS_FLAT)
    for tile in tl.range(begin // BN, last_tile + 1, disable_licm=IS_UNCHAINED):
        key = tile * BN + tl.arange(0, BN)
        is_read = _is_between(key, begin, end, HAS_LOW)
        rows = _find_rows(payload, pages, tile, page_strides[0], STRIDE_ROW, BN, PAGE, IS_FLAT)
        scales_at = _find_rows(
            scales, pages, tile, page_strides[1], STRIDE_SCALES_ROW, BN, PAGE, IS_FLAT
        )
        pages = next_pages.to(tl.int64)
        next_tile = tl.minimum(tile + 2, last_tile)
        next_pages = _load_pages(entries, next_tile, end, stride_entry, BN, PAGE, IS_FLAT)
        latent, rope, factors = load_row_tile(
            rows, scales_at, is_read, PIECES, WIDTH, ROPE_WIDTH, D_C, D_R, FORMAT, DTYPE,
            ROPE_DTYPE, HAS_FP8, IS_ALIGNED,
        )  # fmt: skip
        if IS_UNCHAINED:
            scores = score_keys(q, q_rotated, latent, rope, factors, PIECES, FORMAT, scale_log2)
        else:
            scores = score_keys(q, q_rotated, latent, rope, factors, PIECES, FORMAT)
        scores = _mask_scores(scores, signs, key, low, high, HAS_LOW)
        weights, decay, peak, exp_sum = _softmax_step(
            scores, peak, exp_sum, scale_log2, end, IS_UNCHAINED
        )
        weighted = add_values(
            weighted, weights, decay, latent, factors, VALUE_PIECES, FORMAT, VALUE_UNIT
        )
        if ROPE_COLUMNS > 0:
            rotated = add_rope_values(
                rotated, weights, decay, rope, factors, FORMAT, DTYPE, ROPE_UNIT
            )

    # in a partial there is no sink: it joins the merge, once
    sink_log2 = None
    if sink is not None:
        head = tl.minimum(first_row + tl.arange(0, BM), last_row) % heads
        sink_log2 = tl.load(sink + head.to(tl.int64) * stride_sink) * 1.4426950408889634  # log2(e)
        sink_log2 = tl.where(slot < 0, sink_log2, -float("inf"))
    denominator, row_lse = softmax_totals(peak, exp_sum, sink_log2)
    scale = (tensor_scale / denominator)[:, None]
    places = _store_lse(
        results, partials, slot, rows_at, heads, is_row, row_lse, V_WIDTH, BM, IS_OUT_PACKED
    )
    for piece in tl.static_range(VALUE_PIECES):
        values = weighted[piece] * (scale * (1.0 / VALUE_UNIT))
        _store_columns(places, slot, is_row, values, piece * WIDTH, min(V_WIDTH, D_C))
    if ROPE_COLUMNS > 0:
        _store_columns(places, slot, is_row, rotated * (scale * (1.0 / ROPE_UNIT)), D_C, V_WIDTH)


@triton.jit
def _store_lse(
    results, partials, slot, rows_at, heads, is_row, row_lse, V_WIDTH: tl.constexpr,
    BM: tl.constexpr, IS_PACKED: tl.constexpr,
):  # fmt: skip
    """Pointers [rows] to the rows of out and of the partial, of which `slot` says one is meant."""
    out, lse, stride_out_token, stride_out_head, stride_lse_token, stride_lse_head = results
    partial_out, partial_lse = partials
    partial_row = slot * BM + tl.arange(0, BM)
    if slot < 0:
        at = _row_at(rows_at, heads, stride_lse_token, stride_lse_head, BM, IS_PACKED)
        tl.store(lse + at, row_lse, mask=is_row)
    else:
        tl.store(partial_lse + partial_row, row_lse, mask=is_row)
    out_at = _row_at(rows_at, heads, stride_out_token, stride_out_head, BM, IS_PACKED)
    return out + out_at, partial_out + partial_row * V_WIDTH


VARYING = [
    "stride_q_starts",
    "stride_kv_lens",
    "stride_lse_token",
    "stride_lse_head",
    "scale_log2",
    "tensor_scale",
    "heads",
    "window",
    "rank",
    "world",
    "interleave",
    "batch",
    "runs",
    "split_tiles",
    "max_parts",
    "num_slots",
    "stride_q_scale",
    "stride_table_request",
    "stride_table_entry",
    "stride_starts",
    "stride_sink",
]


@triton.jit(do_not_specialize=VARYING)
def _mla_decode_kernel(
    q_latent,  # [tokens, heads, D_C], e4m3 as bytes
    q_rope,  # [tokens, heads, D_R]
    q_scale,  # [tokens] float32, or None
    payload,  # [pages, PAGE, row], bytes as uint8
    scales,  # [pages, PAGE, n], or None
    table,  # [batch, max_pages] page ids; flat: [n] slots
    starts,  # flat: [batch + 1] into the slots; else None
    sink,  # [heads] float32, or None
    device_scale,  # one number that multiplies all rows, or None
    q_starts,  # [batch + 1]
    kv_lens,  # [batch]
    stride_q_starts,
    stride_kv_lens,
    out,  # [tokens, heads, V_WIDTH]
    lse,  # [tokens, heads] float32
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    partial_out,  # [num_slots, BM, V_WIDTH] float32
    partial_lse,  # [num_slots, BM] float32
    items,  # the plan, see `DecodePlanTensors`, or None
    worker_starts,
    partial_starts,
    scale_log2,  # |softmax_scale| · log2(e) · tensor_scale
    tensor_scale,
    heads,
    window,
    rank,
    world,
    interleave,
    batch,
    runs,
    split_tiles,
    max_parts,
    num_slots,
    stride_q_token,
    stride_q_head,
    stride_rope_token,
    stride_rope_head,
    stride_q_scale,
    stride_page,
    stride_scales_page,
    stride_table_request,
    stride_table_entry,
    stride_starts,
    stride_sink,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr,
    D_C: tl.constexpr,
    D_R: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_PIECES: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    VALUE_UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_SCALES_ROW: tl.constexpr,
    IS_NEGATIVE: tl.constexpr,
    HAS_FP8: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_Q_PACKED: tl.constexpr,
    IS_OUT_PACKED: tl.constexpr,
    IS_UNCHAINED: tl.constexpr,
    SCHEDULE: tl.constexpr,
    MASK: tl.constexpr,
    IS_SHARDED: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SCAN: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """One stretch of the keys of one pair; with a plan, all those of one worker."""
    lengths = (q_starts, kv_lens, stride_q_starts, stride_kv_lens)
    view = (heads, window, rank, world, interleave)
    cuts = (batch, runs, split_tiles, max_parts, num_slots)
    queries = (q_latent, q_rope, q_scale)
    pools = (payload, scales)
    page_strides = (stride_page, stride_scales_page)
    partials = (partial_out, partial_lse)
    q_strides = (
        stride_q_token, stride_q_head, stride_rope_token, stride_rope_head, stride_q_scale
    )  # fmt: skip
    table_strides = (stride_table_request, stride_table_entry, stride_starts)
    results = (
        out, lse, stride_out_token, stride_out_head, stride_lse_token, stride_lse_head
    )  # fmt: skip
    program = tl.program_id(0)
    if device_scale is not None:
        tensor_scale = tl.load(device_scale).to(tl.float32)
        scale_log2 *= tensor_scale
    if SCHEDULE == "planned":
        item = tl.load(worker_starts + program)
        last_item = tl.load(worker_starts + program + 1)
        row_tile = tl.zeros((), tl.int32)
        while item < last_item:
            stretch, is_last = _planned_stretch(
                items + item.to(tl.int64) * 4, row_tile, partial_starts, num_slots, lengths, heads,
                BM, SCAN,
            )  # fmt: skip
            if stretch[1] >= 0:
                _attend(
                    stretch, queries, q_strides, pools, page_strides, table, starts, table_strides,
                    lengths, view, sink, stride_sink, results, partials, scale_log2, tensor_scale,
                    SCHEDULE, MASK, FORMAT, DTYPE, ROPE_DTYPE, D_C, D_R, V_WIDTH, PIECES, WIDTH,
                    VALUE_PIECES, ROPE_WIDTH, VALUE_UNIT, PAGE, STRIDE_ROW, STRIDE_SCALES_ROW,
                    IS_SHARDED, IS_NEGATIVE, HAS_FP8, IS_ALIGNED, IS_Q_PACKED, IS_OUT_PACKED,
                    IS_UNCHAINED, BM, BN,
                )  # fmt: skip
            row_tile = tl.where(is_last, 0, row_tile + 1)
            item += is_last.to(tl.int32)
    else:
        if SCHEDULE == "balanced":
            stretch = _balanced_stretch(
                program, cuts, lengths, view, MASK, IS_SHARDED, BM, BN, SCAN, MIN_TILES
            )
        else:
            stretch = _fixed_stretch(program, cuts, lengths, view, MASK, IS_SHARDED, BM, BN, SCAN)
        if stretch[1] >= 0:
            _attend(
                stretch, queries, q_strides, pools, page_strides, table, starts, table_strides,
                lengths, view, sink, stride_sink, results, partials, scale_log2, tensor_scale,
                SCHEDULE, MASK, FORMAT, DTYPE, ROPE_DTYPE, D_C, D_R, V_WIDTH, PIECES, WIDTH,
                VALUE_PIECES, ROPE_WIDTH, VALUE_UNIT, PAGE, STRIDE_ROW, STRIDE_SCALES_ROW,
                IS_SHARDED, IS_NEGATIVE, HAS_FP8, IS_ALIGNED, IS_Q_PACKED, IS_OUT_PACKED,
                IS_UNCHAINED, BM, BN,
            )  # fmt: skip


@triton.jit
def _balanced_parts(
    cut, cuts, lengths, view, MASK: tl.constexpr, IS_SHARDED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SCAN: tl.constexpr, MIN_TILES: tl.constexpr,
):  # fmt: skip
    """Of the pair that the beginning of run `cut` is the first to cut: (request, tile of rows, slot
    of the first part, slot of the second, parts); 0 parts where there is none."""
    batch, runs, _, _, _ = cuts
    _, total, num_runs = _cut_line(
        runs, lengths, batch, view, MASK, IS_SHARDED, BM, BN, SCAN, MIN_TILES
    )
    is_cut = cut < num_runs
    total = tl.maximum(total, 1)
    num_runs = tl.maximum(num_runs, 1)
    position = tl.minimum(cut * total // num_runs, total - 1)
    request, _, tiles_before = _find_request(
        position, False, lengths, batch, view, MASK, IS_SHARDED, BM, BN, SCAN
    )
    _, q_len, kv_len = _load_lengths(lengths, request, request >= 0)
    _, _, num_tiles = _pairs_of(q_len, kv_len, view, MASK, IS_SHARDED, BM, BN)
    row_tile = (position - tiles_before) // num_tiles
    pair_start = tiles_before + row_tile * num_tiles
    previous = (cut - 1) * total // num_runs
    is_first = (position > pair_start) & (previous <= pair_start)
    parts = _run_of(pair_start + num_tiles - 1, total, num_runs) - (cut - 1) + 1
    first_slot = 2 * (cut - 1) + tl.where(previous == pair_start, 0, 1)
    return (
        request, row_tile.to(tl.int32), first_slot, 2 * cut, tl.where(is_cut & is_first, parts, 0)
    )  # fmt: skip


@triton.jit
def _given_parts(
    pair, cuts, lengths, view, partial_starts, SCHEDULE: tl.constexpr, MASK: tl.constexpr,
    IS_SHARDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """The same of a pair that a plan or a fixed split cuts."""
    batch, _, split_tiles, max_parts, num_slots = cuts
    request, pairs_before, _ = _find_request(
        pair, True, lengths, batch, view, MASK, IS_SHARDED, BM, BN, SCAN
    )
    _, q_len, kv_len = _load_lengths(lengths, request, request >= 0)
    pairs, _, num_tiles = _pairs_of(q_len, kv_len, view, MASK, IS_SHARDED, BM, BN)
    row_tile = (pair - pairs_before).to(tl.int32)
    if SCHEDULE == "fixed":
        parts, _ = _parts_of(num_tiles, split_tiles, max_parts)
        first_slot = pair * max_parts
    else:
        parts = tl.load(partial_starts + request + 1) - tl.load(partial_starts + request)
        slots_before, _ = _slots_before(request, lengths, partial_starts, view[0], BM, SCAN)
        parts = tl.where(slots_before + pairs.to(tl.int64) * parts <= num_slots, parts, 0)
        first_slot = slots_before + row_tile.to(tl.int64) * parts
    parts = tl.where((row_tile < pairs) & (parts > 1), parts, 0)
    return request, row_tile, first_slot, first_slot + 1, parts


MERGE_VARYING = [
    "stride_q_starts",
    "stride_kv_lens",
    "stride_lse_token",
    "stride_lse_head",
    "heads",
    "window",
    "rank",
    "world",
    "interleave",
    "batch",
    "runs",
    "split_tiles",
    "max_parts",
    "num_slots",
    "stride_sink",
]


@triton.jit(do_not_specialize=MERGE_VARYING)
def _merge_pairs_kernel(
    partial_out,  # [num_slots, BM, V_WIDTH] float32
    partial_lse,  # [num_slots, BM] float32
    sink,  # [heads] float32, or None
    q_starts,  # [batch + 1]
    kv_lens,  # [batch]
    stride_q_starts,
    stride_kv_lens,
    out,  # [tokens, heads, V_WIDTH]
    lse,  # [tokens, heads] float32
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    partial_starts,  # [batch + 1], with a plan
    heads,
    window,
    rank,
    world,
    interleave,
    batch,
    runs,
    split_tiles,
    max_parts,
    num_slots,
    stride_sink,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    SCHEDULE: tl.constexpr,
    MASK: tl.constexpr,
    IS_SHARDED: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SCAN: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Merge ROWS rows of a pair that was cut, in the order of its keys."""
    lengths = (q_starts, kv_lens, stride_q_starts, stride_kv_lens)
    view = (heads, window, rank, world, interleave)
    cuts = (batch, runs, split_tiles, max_parts, num_slots)
    index = tl.program_id(0).to(tl.int64)
    if SCHEDULE == "balanced":
        request, row_tile, first_slot, second_slot, parts = _balanced_parts(
            index + 1, cuts, lengths, view, MASK, IS_SHARDED, BM, BN, SCAN, MIN_TILES
        )
    else:
        request, row_tile, first_slot, second_slot, parts = _given_parts(
            index, cuts, lengths, view, partial_starts, SCHEDULE, MASK, IS_SHARDED, BM, BN, SCAN
        )
    STEP: tl.constexpr = 2 if SCHEDULE == "balanced" else 1
    if parts > 0:
        q_first, q_len, _ = _load_lengths(lengths, request, request >= 0)
        in_tile = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        row = row_tile * BM + in_tile
        is_row = row < q_len * heads
        token = (q_first + row // heads).to(tl.int64)
        head = (row % heads).to(tl.int64)
        column = tl.arange(0, COLUMNS)
        in_row = is_row[:, None] & (column < V_WIDTH)[None, :]
        peak = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        weighted = tl.zeros([ROWS, COLUMNS], tl.float32)
        for part in range(parts.to(tl.int32)):
            slot = tl.where(part == 0, first_slot, second_slot + (part - 1) * STEP)
            at = slot * BM + in_tile
            part_lse = tl.load(partial_lse + at, mask=is_row, other=-float("inf"))
            values = tl.load(
                partial_out + at[:, None] * V_WIDTH + column[None, :], mask=in_row, other=0.0
            )
            peak, total, weighted = fold_states(peak, total, weighted, part_lse, values)
        sink_log2 = None
        if sink is not None:
            sink_log2 = tl.load(sink + head * stride_sink, mask=is_row, other=0.0)
            sink_log2 *= 1.4426950408889634  # log2(e)
        merged, merged_lse = merged_state(peak, total, weighted, sink_log2)
        tl.store(
            out + (token * stride_out_token + head * stride_out_head)[:, None] + column[None, :],
            merged.to(out.dtype.element_ty),
            mask=in_row,
        )
        tl.store(lse + token * stride_lse_token + head * stride_lse_head, merged_lse, mask=is_row)
