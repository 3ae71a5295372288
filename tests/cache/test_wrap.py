"""The paged cache over an engine's memory: nothing is copied, each finds the other's rows."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.formats import row_codec
from mlakit.model.geometry import RowShape
from mlakit.tools.testing import assert_same_bits, assert_unchanged, poison, snapshot
from tests.cache.cache_rows import V3, V4, as_bytes, random_rows

BYTE_TYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


def with_padded_pages(blocks: Tensor, padding: int) -> Tensor:
    """The same values, with `padding` unused elements between one page and the next."""
    pages, *page_shape = blocks.shape
    elements = blocks[0].numel()
    storage = torch.empty(pages * (elements + padding) + padding, dtype=blocks.dtype)
    poison(storage)
    strides = (elements + padding, *torch.empty(page_shape).stride())
    padded = storage.as_strided(blocks.shape, strides, padding)
    padded.copy_(blocks)
    return padded


def zeros(*shape: int, dtype: torch.dtype, padding: int = 0) -> Tensor:
    blocks = torch.zeros(shape, dtype=dtype)
    return with_padded_pages(blocks, padding) if padding else blocks


@dataclass(frozen=True)
class Foreign:
    """A tensor as an engine makes it, and how that engine finds the row of a token."""

    name: str
    format: str
    make: Callable[[], Tensor]
    row_at: Callable[[Tensor, int, int, int], Tensor]  # (blocks, layer, page, offset) -> row
    num_layers: int = 1
    row: RowShape = V3
    tensor_scale: float = 1.0
    with_scales: bool = False
    given_format: str | None = None  # where the shape alone is ambiguous

    def __str__(self) -> str:
        return self.name

    def scales(self, blocks: Tensor) -> Tensor | None:
        return torch.zeros(*blocks.shape[:-1], 1) if self.with_scales else None

    def wrap(self, blocks: Tensor, scales: Tensor | None) -> PagedLatentCache:
        return PagedLatentCache.wrap(
            blocks,
            self.row,
            format=self.given_format,
            scales=scales,
            tensor_scale=self.tensor_scale,
        )


def vllm_row(blocks: Tensor, layer: int, page: int, offset: int) -> Tensor:
    return blocks[page, offset]


def flash_mla_row(blocks: Tensor, layer: int, page: int, offset: int) -> Tensor:
    return blocks[page, offset, 0]


def six_axes_row(blocks: Tensor, layer: int, page: int, offset: int) -> Tensor:
    return blocks[page, 0, layer, offset, 0]


def one_of_many_layers() -> Tensor:
    """A layer's view of a pool [pages, layers, page, row]: its pages are far apart."""
    return torch.zeros(4, 5, 3, 576, dtype=torch.bfloat16)[:, 2]


FOREIGN = [
    *(
        Foreign(f"vllm-{name}", name, lambda d=dtype: zeros(4, 3, 576, dtype=d), vllm_row)
        for name, dtype in (
            ("bf16", torch.bfloat16),
            ("fp16", torch.float16),
            ("fp32", torch.float32),
        )
    ),
    *(
        Foreign(
            f"vllm-fp8-{dtype}".replace("torch.", ""),
            "fp8",
            lambda d=dtype: zeros(4, 3, 576, dtype=d),
            vllm_row,
            tensor_scale=0.25,
        )
        for dtype in BYTE_TYPES
    ),
    *(
        Foreign(
            f"vllm-656-{dtype}".replace("torch.", ""),
            "fp8_block128",
            lambda d=dtype: zeros(4, 3, 656, dtype=d),
            vllm_row,
        )
        for dtype in BYTE_TYPES
    ),
    Foreign("vllm-one-of-many-layers", "bf16", one_of_many_layers, vllm_row),
    Foreign(
        "vllm-nope-528",
        "fp8_block128",
        lambda: zeros(4, 3, 528, dtype=torch.uint8),
        vllm_row,
        row=RowShape(512, 0),
    ),
    Foreign("flashmla", "bf16", lambda: zeros(4, 3, 1, 576, dtype=torch.bfloat16), flash_mla_row),
    Foreign(
        "flashmla-padded",
        "bf16",
        lambda: zeros(4, 3, 1, 576, dtype=torch.bfloat16, padding=64),
        flash_mla_row,
    ),
    Foreign(
        "flashmla-656-padded",
        "fp8_block128",
        lambda: zeros(4, 3, 1, 656, dtype=torch.float8_e4m3fn, padding=48),
        flash_mla_row,
    ),
    Foreign(
        "six-axes",
        "bf16",
        lambda: zeros(4, 1, 3, 3, 1, 576, dtype=torch.bfloat16),
        six_axes_row,
        num_layers=3,
    ),
    Foreign(
        "six-axes-fp8-padded",
        "fp8",
        lambda: zeros(4, 1, 3, 3, 1, 576, dtype=torch.float8_e4m3fn, padding=32),
        six_axes_row,
        num_layers=3,
    ),
    Foreign(
        "six-axes-token-scales",
        "fp8_token",
        lambda: zeros(4, 1, 3, 3, 1, 640, dtype=torch.float8_e4m3fn),
        six_axes_row,
        num_layers=3,
        with_scales=True,
    ),
    Foreign(
        "vllm-token-scales",
        "fp8_token",
        lambda: zeros(4, 3, 640, dtype=torch.uint8, padding=16),
        vllm_row,
        with_scales=True,
    ),
    Foreign(
        "nope-token-scales",
        "fp8_token",
        lambda: zeros(4, 3, 512, dtype=torch.uint8),
        vllm_row,
        row=RowShape(512, 0),
        with_scales=True,
        given_format="fp8_token",
    ),
]


@pytest.mark.parametrize("foreign", FOREIGN, ids=str)
def test_wrap_finds_the_format_and_copies_nothing(foreign):
    blocks = foreign.make()
    scales = foreign.scales(blocks)
    pool = foreign.wrap(blocks, scales)
    assert (pool.format, pool.row) == (foreign.format, foreign.row)
    assert (pool.num_layers, pool.num_pages, pool.page_size) == (foreign.num_layers, 4, 3)
    assert pool.payload.data_ptr() == blocks.data_ptr()
    assert pool.payload.untyped_storage().data_ptr() == blocks.untyped_storage().data_ptr()
    if scales is not None:
        assert pool.scales.data_ptr() == scales.data_ptr()


@pytest.mark.parametrize("foreign", FOREIGN, ids=str)
def test_what_the_pool_writes_the_engine_sees_at_its_own_address(foreign, generator):
    blocks = foreign.make()
    scales = foreign.scales(blocks)
    pool = foreign.wrap(blocks, scales)
    codec = row_codec(foreign.format, foreign.row)
    layer, page, offset = foreign.num_layers - 1, 2, 1
    rows = random_rows(1, foreign.row, generator)
    before = snapshot(whole=storage_of(blocks))
    pool.layer(layer).write(torch.tensor([page * 3 + offset]), rows)

    payload, row_scales = codec.encode(rows, tensor_scale=foreign.tensor_scale)
    theirs = foreign.row_at(blocks, layer, page, offset)
    assert_same_bits("the engine's row", as_bytes(theirs), as_bytes(payload[0]))
    if scales is not None:
        theirs_scale = foreign.row_at(scales, layer, page, offset)
        assert_same_bits("the engine's scale", theirs_scale, row_scales[0])
    written = row_mask(blocks, theirs)
    assert_unchanged(before, written={"whole": written})


@pytest.mark.parametrize("foreign", FOREIGN, ids=str)
def test_what_the_engine_writes_the_pool_reads(foreign, generator):
    blocks = foreign.make()
    scales = foreign.scales(blocks)
    pool = foreign.wrap(blocks, scales)
    codec = row_codec(foreign.format, foreign.row)
    rows = random_rows(1, foreign.row, generator)
    payload, row_scales = codec.encode(rows, tensor_scale=foreign.tensor_scale)
    layer, page, offset = 0, 3, 2
    theirs = foreign.row_at(blocks, layer, page, offset)
    theirs.copy_(payload[0] if theirs.dtype == payload.dtype else payload[0].view(theirs.dtype))
    if scales is not None:
        foreign.row_at(scales, layer, page, offset).copy_(row_scales[0])
    expected = codec.decode(payload, row_scales, tensor_scale=foreign.tensor_scale)
    assert_same_bits("rows", pool.layer(layer).read(torch.tensor([page * 3 + offset])), expected)


def storage_of(tensor: Tensor) -> Tensor:
    """All bytes behind a view, those between its strides included."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def row_mask(blocks: Tensor, row: Tensor) -> Tensor:
    """Bool over the bytes behind `blocks`: the bytes of one contiguous row."""
    mask = torch.zeros_like(storage_of(blocks), dtype=torch.bool)
    start = row.data_ptr() - blocks.untyped_storage().data_ptr()
    mask[start : start + row.numel() * row.element_size()] = True
    return mask


def test_a_656_byte_row_written_by_hand_is_read_as_documented():
    blocks = torch.zeros(2, 3, 656, dtype=torch.uint8)
    latent = b"\x38" * 512  # 1.0 in e4m3
    scales = struct.pack("<4f", 0.5, 3.0, 1e-3, 7.25)
    rope = struct.pack("<64H", *[0x4049] * 64)  # 3.140625 in bfloat16
    blocks[1, 2] = torch.frombuffer(bytearray(latent + scales + rope), dtype=torch.uint8)
    row = PagedLatentCache.wrap(blocks, V3).layer(0).read(torch.tensor(5))
    expected = torch.tensor([0.5, 3.0, 1e-3, 7.25]).repeat_interleave(128)
    assert_same_bits("row", row, torch.cat([expected, torch.full((64,), 3.140625)]))


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("dtype", BYTE_TYPES, ids=str)
def test_footer_pages_of_584_are_one_run_of_bytes(axes, dtype, generator):
    pages, page_size, padding = 3, 5, 536  # a page stride of 6 · 576
    shape = (pages, page_size, 584) if axes == 3 else (pages, page_size, 1, 584)
    blocks = zeros(*shape, dtype=dtype, padding=padding)
    pool = PagedLatentCache.wrap(blocks, V4)
    assert (pool.format, pool.num_pages, pool.page_size) == ("fp8_block64", pages, page_size)
    assert pool.payload.data_ptr() == blocks.data_ptr()

    before = snapshot(whole=storage_of(blocks))
    page, token = 2, 3
    rows = random_rows(1, V4, generator)
    pool.layer(0).write(torch.tensor([page * page_size + token]), rows)
    payload, footer = row_codec("fp8_block64", V4).encode(rows)
    start = padding + page * (page_size * 584 + padding)
    row_at, footer_at = start + token * 576, start + page_size * 576 + token * 8
    whole = storage_of(blocks)
    assert_same_bits("row", whole[row_at : row_at + 576], payload[0])
    assert_same_bits("footer", whole[footer_at : footer_at + 8], footer[0])
    written = torch.zeros_like(whole, dtype=torch.bool)
    written[row_at : row_at + 576] = True
    written[footer_at : footer_at + 8] = True
    assert_unchanged(before, written={"whole": written})


def test_footer_pages_of_one_token_may_have_any_row_stride(generator):
    blocks = torch.zeros(3, 2, 584, dtype=torch.uint8)[:, :1]
    pool = PagedLatentCache.wrap(blocks, V4)
    rows = random_rows(3, V4, generator)
    pool.layer(0).write(torch.arange(3), rows)
    codec = row_codec("fp8_block64", V4)
    payload, footer = codec.encode(rows)
    assert_same_bits("pages", blocks[:, 0], torch.cat([payload, footer], -1))
    assert_same_bits("rows", pool.layer(0).read(torch.arange(3)), codec.decode(payload, footer))


def test_wrap_of_what_allocate_made_is_the_same_pool(generator):
    pool = PagedLatentCache.allocate(V3, "fp8_token", num_pages=2, page_size=3)
    again = PagedLatentCache.wrap(pool.payload[0], V3, scales=pool.scales[0])
    rows = random_rows(6, V3, generator)
    pool.layer(0).write(torch.arange(6), rows)
    slots = torch.arange(6)
    assert_same_bits("rows", again.layer(0).read(slots), pool.layer(0).read(slots))


def test_wrap_infers_fp8_rows_too_wide_for_some_other_format():
    blocks = torch.zeros(1, 2, 1024 + 64, dtype=torch.uint8)  # fp8_block64 ends at 512 columns
    assert PagedLatentCache.wrap(blocks, RowShape(1024, 64)).format == "fp8"
    odd = torch.zeros(1, 2, 30 + 2, dtype=torch.uint8)  # no format with scales takes 30 columns
    assert PagedLatentCache.wrap(odd, RowShape(30, 2)).format == "fp8"
