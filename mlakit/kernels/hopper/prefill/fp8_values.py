"""Values of FP8 prefill, rewritten once per call for the attention kernel.

FP8 wgmma takes only a B operand whose K axis is contiguous, and P's registers are an FP8 A operand
only if keys are in another order: in 16 columns of scores a thread has 8h + 2t + b, where the
operand has 4t + 2h + b. So a kernel writes v transposed, in tiles of 128 keys in that order:

    tiles   [heads, tiles, D_V, 128] e4m3; a tile is one TMA load of 16 KB. Tiles of a request begin
            at `kv_start // 128 + request`, its first key at the first one
    flags   [heads, tiles] int32: does the tile have a value that is not finite? It is 0 in the tile
    scales  [heads, tiles, 16, 32] float32, if each key or each value has a scale: of 128 keys
            k_scale, log2 of |v_scale| (plus LOG2_SHIFT) and its inverse, four rows each, keys in
            the order of the tile. TMA swizzles what it loads; the rows are swizzled here, so that
            shared memory has plain vectors. The sign of v_scale is in the tile.
            [heads, tiles, 8, 8] if each tile has a scale: k_scale, log2 of |v_scale|, its inverse
            and 0, 16 times: the same, however TMA swizzles them
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlakit.formats import SCALE_BLOCK
from mlakit.kernels import workspace
from mlakit.kernels.arguments import stride_of
from mlakit.kernels.launch import launch

BLOCK = SCALE_BLOCK  # keys of a tile, and of the attention kernel's blocks
CHUNK = 256  # requests at a time
TOKEN_SCALES = (16, 32)  # of a tile
BLOCK_SCALES = (8, 8)
NO_SCALE = 2.0**-60  # of values that are 0: a scale of 0 has no logarithm
LOG2_SHIFT = 64.0  # is added to logarithms: scores that they are added to are then positive


def max_value_tiles(keys: int, batch: int) -> int:
    return keys // BLOCK + batch


class ScaleKinds(NamedTuple):
    """Kinds of scales that vary: by key, by value, by block of both."""

    has_keys: bool
    has_values: bool
    has_blocks: bool


class RewriteInputs(NamedTuple):
    """Values of a call, and their scales."""

    v: Tensor  # [keys, heads, D_V] e4m3
    k_scale: Tensor | None  # [keys] or [count] float32
    v_scale: Tensor | None  # [keys, heads] or [count, heads] float32
    kv_starts: Tensor  # [batch + 1]
    stride_token: int  # of v
    stride_head: int
    stride_column: int


class RewriteOutputs(NamedTuple):
    """What the attention kernel reads instead of v; see above."""

    tiles: Tensor
    flags: Tensor
    scales: Tensor | None


def scale_kinds(k_scale: Tensor | None, v_scale: Tensor | None, keys_per_scale: int) -> ScaleKinds:
    # a scale with a stride of 0 is one for all
    varies = [scale is not None and scale.stride(0) != 0 for scale in (k_scale, v_scale)]
    if keys_per_scale == 1:
        return ScaleKinds(*varies, has_blocks=False)
    return ScaleKinds(False, False, has_blocks=any(varies))


def rewrite_values(
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_starts: Tensor,
    kinds: ScaleKinds,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (tiles, flags, scales)"""
    keys, heads, d_v = v.shape
    batch = kv_starts.shape[0] - 1
    count = max_value_tiles(keys, batch)
    tiles = workspace.scratch((heads, count, d_v, BLOCK), v.dtype, v.device)
    flags = workspace.scratch((heads, count), torch.int32, v.device)
    scales = None
    if any(kinds):
        shape = BLOCK_SCALES if kinds.has_blocks else TOKEN_SCALES
        scales = workspace.scratch((heads, count, *shape), torch.float32, v.device)
    stride_scale_token, stride_scale_head = (0, 0) if v_scale is None else v_scale.stride()
    launch(
        _rewrite_values_kernel,
        (heads, count),
        inputs=RewriteInputs(v, k_scale, v_scale, kv_starts, *v.stride()),
        outputs=RewriteOutputs(tiles, flags, scales),
        batch=batch,
        stride_k_scale=stride_of(k_scale, 0),
        stride_scale_token=stride_scale_token,
        stride_scale_head=stride_scale_head,
        stride_kv_starts=kv_starts.stride(0),
        D_V=d_v,
        BLOCK=BLOCK,
        CHUNK=CHUNK,
        KINDS=kinds,
        NO_SCALE=NO_SCALE,
        LOG2_SHIFT=LOG2_SHIFT,
        BY_WORDS=v.stride(2) == 1 and all(at % 16 == 0 for at in (v.data_ptr(), *v.stride()[:2])),
        num_warps=8,
    )
    return tiles, flags, scales


VARYING = ["batch", "stride_k_scale", "stride_scale_token", "stride_scale_head", "stride_kv_starts"]


@triton.jit(do_not_specialize=VARYING)
def _rewrite_values_kernel(
    inputs,  # `RewriteInputs`
    outputs,  # `RewriteOutputs`
    batch,
    stride_k_scale,
    stride_scale_token,  # of v_scale
    stride_scale_head,
    stride_kv_starts,
    D_V: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    KINDS: tl.constexpr,  # `ScaleKinds`
    NO_SCALE: tl.constexpr,
    LOG2_SHIFT: tl.constexpr,
    BY_WORDS: tl.constexpr,  # columns are contiguous, at multiples of 16 bytes
):
    """Rewrite one tile of values of one head; the grid is (heads, tiles)."""
    head, tile = tl.program_id(0), tl.program_id(1)
    kv_starts, k_scale, v_scale = inputs.kv_starts, inputs.k_scale, inputs.v_scale
    # the last request whose tiles do not begin after this one
    request = -1
    for start in tl.range(0, batch, CHUNK):
        other = start + tl.arange(0, CHUNK)
        is_there = other < batch
        first = tl.load(kv_starts + other * stride_kv_starts, mask=is_there, other=0).to(tl.int32)
        is_before = is_there & (first // BLOCK + other <= tile)
        request += tl.sum(is_before.to(tl.int32), 0)
    kv_start = tl.load(kv_starts + request * stride_kv_starts).to(tl.int32)
    kv_end = tl.load(kv_starts + (request + 1) * stride_kv_starts).to(tl.int32)
    first_key = kv_start + (tile - kv_start // BLOCK - request) * BLOCK
    if first_key < kv_end:
        index = head.to(tl.int64) * tl.num_programs(1) + tile
        place = tl.arange(0, BLOCK)
        IS_SIGNED: tl.constexpr = KINDS.has_values or KINDS.has_blocks
        if KINDS.has_blocks:
            # all keys have the scale of the tile
            if k_scale is not None:
                k_scale += tile.to(tl.int64) * stride_k_scale
            if v_scale is not None:
                v_scale += tile.to(tl.int64) * stride_scale_token
            stride_scale_token = 0
        at = (head, index, first_key, kv_end)
        scales = (v_scale, stride_scale_token, stride_scale_head)
        if BY_WORDS:
            is_flagged = _rewrite_words(inputs, scales, outputs.tiles, at, IS_SIGNED, D_V, BLOCK)
        else:
            is_flagged = _rewrite_bytes(inputs, scales, outputs.tiles, at, IS_SIGNED, D_V, BLOCK)
        tl.store(outputs.flags + index, is_flagged)
        key = (first_key + place).to(tl.int64)
        if KINDS.has_keys:
            scale = tl.load(k_scale + key * stride_k_scale, mask=key < kv_end, other=0.0)
            _store_vector(outputs.scales, index, 0, place, scale)
        if KINDS.has_values:
            scale = _size_of(_value_scale(scales, head, key, key < kv_end), NO_SCALE)
            _store_vector(outputs.scales, index, 4, place, tl.log2(scale) + LOG2_SHIFT)
            _store_vector(outputs.scales, index, 8, place, 1.0 / scale)
        if KINDS.has_blocks:
            head_offset = head.to(tl.int64) * stride_scale_head
            _store_block_scales(outputs.scales, index, k_scale, v_scale, head_offset, NO_SCALE)


@triton.jit
def _rewrite_bytes(
    inputs, scales, tiles, at, IS_SIGNED: tl.constexpr, D_V: tl.constexpr, BLOCK: tl.constexpr
):
    """Rewrite a tile of values with any strides; return 1 if some are not finite, else 0.

    scales  (v_scale, its strides)
    at      (head, number of the tile, its first key, the end of the request's keys)
    """
    head, index, first_key, kv_end = at
    place = tl.arange(0, BLOCK)
    row = (first_key + place).to(tl.int64)
    is_key = row < kv_end
    column = tl.arange(0, D_V)
    values = inputs.v.to(tl.pointer_type(tl.uint8)) + head.to(tl.int64) * inputs.stride_head
    values = values + row[None, :] * inputs.stride_token + column[:, None] * inputs.stride_column
    bits = tl.load(values, mask=is_key[None, :], other=0)
    is_good = (bits & 0x7F) != 0x7F
    if scales[0] is not None:
        scale = _value_scale(scales, head, row, is_key)
        is_good = is_good & (tl.abs(scale) < float("inf"))[None, :]
        if IS_SIGNED:
            bits = bits ^ tl.where(scale < 0.0, 0x80, 0).to(tl.uint8)[None, :]
    bits = tl.reshape(tl.where(is_good, bits, 0), [D_V, BLOCK // 16, 2, 4, 2])
    bits = tl.reshape(tl.permute(bits, (0, 1, 3, 2, 4)), [D_V, BLOCK]).to(tl.uint8)
    out = tiles.to(tl.pointer_type(tl.uint8)) + index * (D_V * BLOCK)
    tl.store(out + column[:, None] * BLOCK + place[None, :], bits)
    return 1 - tl.min(tl.min(is_good.to(tl.int32), 1), 0)


@triton.jit
def _rewrite_words(
    inputs, scales, tiles, at, IS_SIGNED: tl.constexpr, D_V: tl.constexpr, BLOCK: tl.constexpr
):
    """`_rewrite_bytes` of contiguous columns at multiples of 16 bytes, four bytes at a time."""
    head, index, first_key, kv_end = at
    words = inputs.v.to(tl.pointer_type(tl.uint32)) + head.to(tl.int64) * (inputs.stride_head // 4)
    group = tl.arange(0, BLOCK // 4)  # of four places
    column = tl.arange(0, D_V // 4)
    is_flagged = tl.zeros([BLOCK // 4, D_V // 4], tl.uint32)
    keys = ()
    for i in tl.static_range(4):
        # the key of place 4t + 2h + b is 8h + 2t + b
        row = first_key + group // 4 * 16 + (i // 2) * 8 + group % 4 * 2 + i % 2
        is_key = row < kv_end
        row = row.to(tl.int64)
        row_words = words + row[:, None] * (inputs.stride_token // 4) + column[None, :]
        four = tl.load(row_words, mask=is_key[:, None], other=0)
        # 1 in each byte that is NaN: 0x7f carries into the highest bit
        is_bad = (((four & 0x7F7F7F7F) + 0x01010101) >> 7) & 0x01010101
        if scales[0] is not None:
            scale = _value_scale(scales, head, row, is_key)
            is_bad = tl.where((tl.abs(scale) < float("inf"))[:, None], is_bad, 0x01010101)
            if IS_SIGNED:
                four = four ^ tl.where(scale < 0.0, 0x80808080, 0).to(tl.uint32)[:, None]
        is_flagged |= is_bad
        keys = keys + (four & ~(is_bad * 255),)  # noqa: RUF005
    # bytes of a word are now columns of a key; they become keys of a column
    even01 = (keys[0] & 0x00FF00FF) | ((keys[1] & 0x00FF00FF) << 8)
    even23 = (keys[2] & 0x00FF00FF) | ((keys[3] & 0x00FF00FF) << 8)
    odd01 = ((keys[0] >> 8) & 0x00FF00FF) | (keys[1] & 0xFF00FF00)
    odd23 = ((keys[2] >> 8) & 0x00FF00FF) | (keys[3] & 0xFF00FF00)
    out = tiles.to(tl.pointer_type(tl.uint32)) + index * (D_V * BLOCK // 4)
    out = out + column[:, None] * BLOCK + group[None, :]
    tl.store(out, tl.trans((even01 & 0xFFFF) | (even23 << 16)))
    tl.store(out + BLOCK // 4, tl.trans((odd01 & 0xFFFF) | (odd23 << 16)))
    tl.store(out + BLOCK // 2, tl.trans((even01 >> 16) | (even23 & 0xFFFF0000)))
    tl.store(out + 3 * BLOCK // 4, tl.trans((odd01 >> 16) | (odd23 & 0xFFFF0000)))
    return tl.max(tl.max((is_flagged != 0).to(tl.int32), 1), 0)


@triton.jit
def _size_of(scale, NO_SCALE: tl.constexpr):
    """Return |scale|, if it has a logarithm."""
    scale = tl.abs(scale)
    return tl.where((scale > NO_SCALE) & (scale < float("inf")), scale, NO_SCALE)


@triton.jit
def _store_block_scales(scales, index, k_scale, v_scale, head_offset, NO_SCALE: tl.constexpr):
    """Store the scales of blocks; see `scales` above."""
    of_keys, of_values = 1.0, 1.0
    if k_scale is not None:
        of_keys = tl.load(k_scale)
    if v_scale is not None:
        of_values = _size_of(tl.load(v_scale + head_offset), NO_SCALE)
    place = tl.arange(0, 64)
    four = tl.where(place % 4 == 0, of_keys, 0.0)
    four = tl.where(place % 4 == 1, tl.log2(of_values + tl.zeros([64], tl.float32)), four)
    four = tl.where(place % 4 == 2, 1.0 / of_values, four)
    tl.store(scales + index * 64 + place, four)


@triton.jit
def _value_scale(scales, head, row, is_key):
    v_scale, stride_token, stride_head = scales
    at = v_scale + head.to(tl.int64) * stride_head + row * stride_token
    return tl.load(at, mask=is_key, other=1.0)


@triton.jit
def _store_vector(scales, index, FIRST_ROW: tl.constexpr, place, vector):
    # in each 16 keys the order of values
    place = place // 16 * 16 + place % 8 // 2 * 4 + place % 16 // 8 * 2 + place % 2
    row = FIRST_ROW + place // 32
    # 16 bytes of a row change places as TMA changes them
    column = (place % 32 // 4 ^ row % 8) * 4 + place % 4
    tl.store(scales + (index * 16 + row) * 32 + column, vector)
