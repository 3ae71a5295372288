"""The paged cache: where every byte lies, whose memory it is, and which row a token has."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mlakit.cache import (
    PagedLatentCache,
    request_slots,
    select_requests,
    token_requests,
    token_slots,
)
from mlakit.formats import FORMATS, row_codec
from mlakit.geometry import MLAGeometry, RowShape
from mlakit.testing import (
    NEVER_A_PAGE,
    assert_same_bits,
    assert_unchanged,
    poison,
    shuffled_pages,
    snapshot,
)

V3 = RowShape(512, 64)
V4 = RowShape(448, 64, 512)
BYTE_TYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


def row_of(format: str) -> RowShape:
    return V4 if format == "fp8_block64" else V3


def random_rows(count: int, row: RowShape, generator: torch.Generator) -> Tensor:
    return torch.randn(count, row.width, generator=generator)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("format", FORMATS)
def test_allocate_makes_an_empty_pool(format, device):
    pool = PagedLatentCache.allocate(
        row_of(format), format, num_pages=3, page_size=5, num_layers=2, device=device
    )
    codec = row_codec(format, row_of(format))
    assert (pool.format, pool.row, pool.device.type) == (format, row_of(format), device.type)
    assert (pool.num_layers, pool.num_pages, pool.page_size) == (2, 3, 5)
    assert pool.payload.shape == (2, 3, 5, codec.payload_elements)
    assert pool.payload.dtype == codec.payload_dtype
    assert not as_bytes(pool.payload).any()
    if codec.scale_dtype is None:
        assert pool.scales is None
    else:
        assert pool.scales.shape == (2, 3, 5, codec.scale_elements)
        assert pool.scales.dtype == codec.scale_dtype
        assert not as_bytes(pool.scales).any()
    layer = pool.layer(1)
    assert (layer.page_size, layer.num_slots) == (5, 15)


def test_allocate_takes_a_geometry_and_defaults_to_bf16_pages_of_64():
    pool = PagedLatentCache.allocate(MLAGeometry.preset("deepseek-v3"), num_pages=2)
    assert pool.payload.shape == (1, 2, 64, 576)
    assert pool.payload.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("format", "bytes_per_page"),
    [
        ("bf16", 5 * 1152),
        ("fp16", 5 * 1152),
        ("fp32", 5 * 2304),
        ("fp8", 5 * 576),
        ("fp8_token", 5 * 640),
        ("fp8_block128", 5 * 656),
        ("fp8_block64", 6 * 576),  # 5 · 584 bytes, padded to a multiple of 576
    ],
)
def test_a_pool_takes_the_memory_its_format_says(format, bytes_per_page):
    pool = PagedLatentCache.allocate(row_of(format), format, num_pages=3, page_size=5, num_layers=2)
    assert pool.payload.untyped_storage().nbytes() == 2 * 3 * bytes_per_page
    if format == "fp8_token":
        assert pool.scales.untyped_storage().nbytes() == 2 * 3 * 5 * 4


@pytest.mark.parametrize("format", FORMATS)
def test_rows_come_back_as_the_codec_stores_them(format, device, generator):
    pool = PagedLatentCache.allocate(
        row_of(format), format, num_pages=4, page_size=3, num_layers=3, device=device
    )
    slots = torch.randperm(12, generator=generator)[:7].to(device)
    rows = random_rows(7, pool.row, generator).to(device)
    pool.layer(1).write(slots, rows)

    codec = row_codec(format, pool.row)
    expected = codec.decode(*codec.encode(rows), dtype=torch.float64)
    assert_same_bits("rows", pool.layer(1).read(slots, torch.float64), expected)
    assert pool.layer(1).read(slots).dtype == torch.float32
    grid = slots[:6].reshape(2, 3)
    assert_same_bits("a grid", pool.layer(1).read(grid, torch.float64)[1, 2], expected[5])


@pytest.mark.parametrize("format", FORMATS)
def test_a_write_touches_its_own_rows_only(format, generator):
    pool = PagedLatentCache.allocate(row_of(format), format, num_pages=4, page_size=3, num_layers=3)
    tensors = {"payload": pool.payload}
    if pool.scales is not None:
        tensors["scales"] = pool.scales
    for tensor in tensors.values():
        poison(tensor)
    before = snapshot(**tensors)
    slots = torch.tensor([0, 11, 5])
    pool.layer(1).write(slots, random_rows(3, pool.row, generator))

    written = torch.zeros(3, 4, 3, dtype=torch.bool)
    written[1].view(-1)[slots] = True
    assert_unchanged(before, written=dict.fromkeys(tensors, written))
    assert pool.layer(1).read(slots).isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
def test_writing_no_rows_changes_nothing(format):
    pool = PagedLatentCache.allocate(row_of(format), format, num_pages=1, page_size=3)
    before = snapshot(payload=pool.payload)
    nowhere = torch.empty(0, dtype=torch.int64)
    pool.layer(0).write(nowhere, torch.empty(0, pool.row.width))
    assert_unchanged(before)
    assert pool.layer(0).read(nowhere).shape == (0, pool.row.width)


@pytest.mark.parametrize("scale", [2.5, torch.tensor(2.5)], ids=["number", "tensor"])
def test_fp8_stores_rows_divided_by_the_tensor_scale(scale):
    pool = PagedLatentCache.allocate(
        V3, "fp8", num_pages=1, page_size=2, num_layers=2, tensor_scale=scale
    )
    rows = torch.full((1, 576), 5.0)
    rows[0, 0] = 1e6
    pool.layer(1).write(torch.tensor([1]), rows)
    stored = pool.payload[1, 0, 1].float()
    assert stored[0] == 448  # writes saturate
    assert (stored[1:] == 2).all()
    assert pool.layer(1).read(torch.tensor(1))[:2].tolist() == [1120.0, 5.0]


def test_power_of_two_scales_are_a_choice_of_the_writer(generator):
    pool = PagedLatentCache.allocate(V3, "fp8_block128", num_pages=1, page_size=2)
    rows = random_rows(1, V3, generator)
    for slot, power_of_two in enumerate((False, True)):
        pool.layer(0).write(torch.tensor([slot]), rows, power_of_two_scales=power_of_two)
        scales = pool.payload[0, 0, slot, 512:528].clone().view(torch.float32)
        is_power = torch.frexp(scales)[0] == 0.5
        assert bool(is_power.all()) is power_of_two


def test_block64_page_is_rows_then_a_footer_of_scales():
    pages, page_size, page_stride = 3, 5, 6 * 576
    pool = PagedLatentCache.allocate(
        V4, "fp8_block64", num_pages=pages, page_size=page_size, num_layers=2
    )
    # group g holds ±448 · 2**(g − 3): e4m3 stores ±448, the scale's byte is 127 + g − 3
    groups = 448.0 * 2.0 ** (torch.arange(7).repeat_interleave(64) - 3)
    row = torch.cat([groups, torch.full((64,), 1.5)])
    slot = 2 * page_size + 4
    pool.layer(1).write(torch.tensor([slot]), row[None])
    pool.layer(1).write(torch.tensor([slot - 1]), -row[None])

    expected = bytearray(2 * pages * page_stride)
    page = (pages + 2) * page_stride  # layer 1, page 2
    for token, latent, rope in ((4, b"\x7e", b"\xc0\x3f"), (3, b"\xfe", b"\xc0\xbf")):
        start = page + token * 576
        expected[start : start + 576] = latent * 448 + rope * 64
        footer = page + page_size * 576 + token * 8
        expected[footer : footer + 8] = bytes([*range(124, 131), 0])
    assert bytes(pool.payload.untyped_storage().tolist()) == bytes(expected)


def with_padded_pages(blocks: Tensor, padding: int) -> Tensor:
    """The same values, with `padding` elements that are nobody's between one page and the next."""
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
    given_format: str | None = None  # where the shape alone does not tell

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


class Refusal(NamedTuple):
    name: str
    call: Callable[[], object]
    error: type[Exception]
    message: str

    def __str__(self) -> str:
        return self.name


def wrap(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: object) -> object:
    return PagedLatentCache.wrap(torch.zeros(shape, dtype=dtype), V3, **options)


def allocate(**options: object) -> object:
    return PagedLatentCache.allocate(V3, **{"num_pages": 2, **options})


REFUSALS = [
    Refusal(
        "width",
        lambda: wrap(4, 3, 575),
        ValueError,
        "PagedLatentCache.wrap: blocks must have rows of 576 (format bf16 of "
        "RowShape(kv_lora_rank=512, qk_rope_head_dim=64, v_width=512)), got shape (4, 3, 575)",
    ),
    Refusal(
        "byte-width",
        lambda: wrap(4, 3, 600, dtype=torch.uint8),
        ValueError,
        "blocks must have rows of 576 (fp8) or 640 (fp8_token) or 656 (fp8_block128) or 648 "
        "(fp8_block64) bytes for RowShape(kv_lora_rank=512, qk_rope_head_dim=64, v_width=512), "
        "got 600",
    ),
    Refusal(
        "width-of-a-given-format",
        lambda: wrap(4, 3, 640, dtype=torch.uint8, format="fp8_block128"),
        ValueError,
        "blocks must have rows of 656 (format fp8_block128 of",
    ),
    Refusal(
        "width-of-footer-pages",
        lambda: wrap(4, 3, 584, dtype=torch.uint8, format="fp8_block64"),
        ValueError,
        "blocks must have rows of 648 (format fp8_block64 of",
    ),
    Refusal(
        "dtype",
        lambda: wrap(4, 3, 576, dtype=torch.int32),
        TypeError,
        "blocks must be bfloat16 or float16 or float32 or uint8 or int8 or float8_e4m3fn, "
        "got int32",
    ),
    Refusal(
        "dtype-of-a-given-format",
        lambda: wrap(4, 3, 576, format="fp8"),
        TypeError,
        "blocks must be float8_e4m3fn, got bfloat16",
    ),
    Refusal(
        "bytes-for-halves",
        lambda: wrap(4, 3, 576, dtype=torch.uint8, format="bf16"),
        TypeError,
        "blocks must be bfloat16, got uint8",
    ),
    Refusal("unknown-format", lambda: wrap(4, 3, 576, format="fp9"), ValueError, "'fp9'"),
    Refusal(
        "not-a-tensor",
        lambda: PagedLatentCache.wrap([[0.0]], V3),
        TypeError,
        "blocks must be a tensor, got list",
    ),
    *(
        Refusal(
            f"{len(shape)}-axes",
            lambda shape=shape: wrap(*shape),
            ValueError,
            f"blocks must have 3, 4 or 6 axes (see PagedLatentCache.wrap), got {len(shape)}",
        )
        for shape in [(), (576,), (3, 576), (4, 1, 3, 1, 576)]
    ),
    Refusal(
        "two-kv-heads",
        lambda: wrap(4, 3, 2, 576),
        ValueError,
        "blocks.shape[2] must be one KV head, got 2",
    ),
    Refusal(
        "keys-and-values",
        lambda: wrap(4, 2, 1, 3, 1, 576),
        ValueError,
        "blocks.shape[1] must be 1, got 2",
    ),
    Refusal(
        "six-axes-kv-heads",
        lambda: wrap(4, 1, 1, 3, 8, 576),
        ValueError,
        "blocks.shape[4] must be 1, got 8",
    ),
    Refusal(
        "no-page-size",
        lambda: wrap(4, 0, 576),
        ValueError,
        "blocks must have a page size of at least 1, got 0",
    ),
    Refusal(
        "strided-rows",
        lambda: PagedLatentCache.wrap(torch.zeros(4, 3, 1152)[..., ::2], V3),
        ValueError,
        "blocks must have a contiguous last axis, got strides (3456, 1152, 2)",
    ),
    Refusal(
        "strided-footer-rows",
        lambda: PagedLatentCache.wrap(torch.zeros(4, 3, 1168, dtype=torch.uint8)[..., ::2], V4),
        ValueError,
        "blocks must have a contiguous last axis, got strides (3504, 1168, 2)",
    ),
    Refusal(
        "footer-pages-with-gaps",
        lambda: PagedLatentCache.wrap(torch.zeros(4, 3, 600, dtype=torch.uint8)[..., :584], V4),
        ValueError,
        "blocks must have contiguous pages, a row every 584 bytes, got one every 600",
    ),
    Refusal(
        "meta",
        lambda: PagedLatentCache.wrap(torch.zeros(4, 3, 576, device="meta"), V3),
        ValueError,
        "blocks must be on a device that holds data, got a meta tensor",
    ),
    Refusal(
        "scales-missing",
        lambda: wrap(4, 3, 640, dtype=torch.uint8),
        ValueError,
        "scales must be given for format fp8_token, got None",
    ),
    *(
        Refusal(
            f"scales-superfluous-{format}",
            lambda format=format, dtype=dtype, width=width: wrap(
                4, 3, width, dtype=dtype, format=format, scales=torch.ones(4, 3, 1)
            ),
            ValueError,
            f"scales must be None for format {format}, which keeps none in a tensor of their own, "
            "got a tensor",
        )
        for format, dtype, width in [
            ("bf16", torch.bfloat16, 576),
            ("fp8", torch.uint8, 576),
            ("fp8_block128", torch.uint8, 656),
            ("fp8_block64", torch.uint8, 648),
        ]
    ),
    Refusal(
        "scales-dtype",
        lambda: wrap(4, 3, 640, dtype=torch.uint8, scales=torch.ones(4, 3, 1).half()),
        TypeError,
        "scales must be float32, got float16",
    ),
    Refusal(
        "scales-not-a-tensor",
        lambda: wrap(4, 3, 640, dtype=torch.uint8, scales=1.0),
        TypeError,
        "scales must be a tensor, got float",
    ),
    Refusal(
        "scales-axes",
        lambda: wrap(4, 3, 640, dtype=torch.uint8, scales=torch.ones(4, 3)),
        ValueError,
        "scales must have 3, 4 or 6 axes (see PagedLatentCache.wrap), got 2",
    ),
    Refusal(
        "scales-pages",
        lambda: wrap(4, 3, 640, dtype=torch.uint8, scales=torch.ones(5, 3, 1)),
        ValueError,
        "(pages) must equal blocks.shape[1], 4, got 5",
    ),
    Refusal(
        "scales-per-token",
        lambda: wrap(4, 3, 640, dtype=torch.uint8, scales=torch.ones(4, 3, 2)),
        ValueError,
        "(scale) must equal the scales of format fp8_token, 1, got 2",
    ),
    *(
        Refusal(
            f"tensor-scale-{scale}",
            lambda scale=scale: wrap(4, 3, 576, dtype=torch.uint8, tensor_scale=scale),
            ValueError,
            f"tensor_scale must be {rule}, got {scale}",
        )
        for scale, rule in [(0.0, "positive"), (-1.0, "positive"), (float("nan"), "finite")]
    ),
    Refusal(
        "tensor-scale-of-two",
        lambda: wrap(4, 3, 576, dtype=torch.uint8, tensor_scale=torch.ones(2)),
        ValueError,
        "tensor_scale must have one element, got shape (2,)",
    ),
    Refusal(
        "tensor-scale-of-bf16",
        lambda: wrap(4, 3, 576, tensor_scale=2.0),
        ValueError,
        "tensor_scale must be left at 1.0 for format bf16, got 2.0",
    ),
    Refusal(
        "allocated-tensor-scale",
        lambda: allocate(format="fp8_block128", tensor_scale=2.0),
        ValueError,
        "PagedLatentCache.allocate: tensor_scale must be left at 1.0 for format fp8_block128",
    ),
    *(
        Refusal(
            f"allocate-{name}",
            lambda name=name: allocate(**{name: 0}),
            ValueError,
            f"PagedLatentCache.allocate: {name} must be at least 1, got 0",
        )
        for name in ("num_pages", "page_size", "num_layers")
    ),
    Refusal(
        "allocate-half-a-page",
        lambda: allocate(page_size=2.5),
        TypeError,
        "page_size must be an integer, got float",
    ),
    Refusal("allocate-unknown", lambda: allocate(format="int4"), ValueError, "'int4'"),
    Refusal(
        "allocate-row-too-wide",
        lambda: PagedLatentCache.allocate(RowShape(576, 64), "fp8_block64", num_pages=1),
        ValueError,
        "fp8_block64: kv_lora_rank must not exceed 512",
    ),
    *(
        Refusal(
            f"layer-{index}",
            lambda index=index: allocate(num_layers=3).layer(index),
            ValueError,
            f"PagedLatentCache.layer: index must be in [0, 3), got {index}",
        )
        for index in (-1, 3)
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_a_wrong_argument_is_named(refusal):
    with pytest.raises(refusal.error, match=re.escape(refusal.message)):
        refusal.call()


def slots_by_hand(table: Tensor, page_size: int, request: int, tokens: range) -> list[int]:
    return [int(table[request, t // page_size]) * page_size + t % page_size for t in tokens]


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_request_slots_follow_the_page_table(page_size, dtype, generator):
    lengths = [0, 1, page_size, page_size + 1, 5 * page_size]
    counts = [-(-length // page_size) for length in lengths]
    # entries past a request's last page are NEVER_A_PAGE: read, they would give a slot
    table = shuffled_pages(len(lengths), counts, 2 * sum(counts), generator).to(dtype)
    assert (table == NEVER_A_PAGE).any()
    for request, length in enumerate(lengths):
        slots = request_slots(table, page_size, request, 0, length)
        assert slots.dtype == torch.int64
        assert slots.tolist() == slots_by_hand(table, page_size, request, range(length))


def test_request_slots_of_a_span_do_not_look_at_other_pages():
    table = torch.full((2, 6), NEVER_A_PAGE, dtype=torch.int32)
    table[1, 2:4] = torch.tensor([7, 1], dtype=torch.int32)
    assert request_slots(table, 4, 1, 9, 14).tolist() == [29, 30, 31, 4, 5]
    assert request_slots(table, 4, 0, 0, 0).tolist() == []
    assert request_slots(table[:, :0], 4, 1, 0, 0).tolist() == []


def test_slots_beyond_int32_keep_their_value():
    table = torch.tensor([[40_000_000]], dtype=torch.int32)
    expected = 40_000_000 * 64 + 5  # above 2**31
    assert request_slots(table, 64, 0, 5, 6).tolist() == [expected]
    here = torch.tensor([0])
    assert token_slots(table, 64, here, torch.tensor([5])).tolist() == [expected]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_flat_table_lists_the_rows_of_all_requests(dtype):
    starts = torch.tensor([0, 3, 3, 5], dtype=dtype)
    garbage = NEVER_A_PAGE
    flat = torch.tensor([9, 4, 6, 2, 8, garbage, garbage], dtype=dtype)
    spans = [(0, 0, 3), (0, 1, 2), (1, 0, 0), (2, 0, 2), (2, 1, 2)]
    found = [request_slots((starts, flat), 1, *span) for span in spans]
    assert [slots.tolist() for slots in found] == [[9, 4, 6], [4], [], [2, 8], [8]]
    assert all(slots.dtype == torch.int64 for slots in found)

    request, position = torch.tensor([2, 0, 0]), torch.tensor([1, 2, 0])
    slots = token_slots((starts, flat), 1, request, position)
    assert (slots.dtype, slots.tolist()) == (torch.int64, [8, 6, 9])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_requests_are_selected_from_a_flat_table(dtype, device):
    starts = torch.tensor([0, 3, 3, 5], dtype=dtype, device=device)
    flat = torch.tensor([9, 4, 6, 2, 8, NEVER_A_PAGE], dtype=dtype, device=device)
    for tokens, rows in ((None, [2, 8, 9, 4, 6]), ([1, 0, 2], [2, 9, 4])):
        new_starts, slots = select_requests((starts, flat), [2, 1, 0], tokens)
        assert (new_starts.dtype, slots.dtype) == (dtype, dtype)
        counts = tokens or [2, 0, 3]
        assert new_starts.diff().tolist() == counts
        assert slots.tolist() == rows
    new_starts, slots = select_requests((starts, flat), [])
    assert (new_starts.tolist(), slots.tolist()) == ([0], [])


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_token_slots_are_the_request_slots_of_single_tokens(page_size, generator):
    cached, new = [0, 2, 130, 7], [4, 0, 3, 1]
    counts = [
        -(-(before + tokens) // page_size) for before, tokens in zip(cached, new, strict=True)
    ]
    table = shuffled_pages(4, counts, 2 * sum(counts), generator)
    request, index = token_requests(torch.tensor([0, 4, 4, 7, 8]), 8)
    slots = token_slots(table, page_size, request, torch.tensor(cached)[request] + index)
    expected = [
        request_slots(table, page_size, b, before, before + tokens)
        for b, (before, tokens) in enumerate(zip(cached, new, strict=True))
    ]
    assert_same_bits("slots", slots, torch.cat(expected))


@pytest.mark.parametrize(
    ("starts", "requests", "indices"),
    [
        ([0, 2, 5], [0, 0, 1, 1, 1], [0, 1, 0, 1, 2]),
        ([0, 0, 0, 2, 2, 3, 3], [2, 2, 4], [0, 1, 0]),  # empty first, in between, last
        ([0, 0, 0], [], []),
        ([0], [], []),
        ([0, 1], [0], [0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_token_requests_pass_over_empty_requests(starts, requests, indices, dtype, device):
    q_starts = torch.tensor(starts, dtype=dtype, device=device)
    request, index = token_requests(q_starts, starts[-1])
    assert (request.tolist(), index.tolist()) == (requests, indices)
    assert request.dtype == index.dtype == torch.int64
