"""The pools the library allocates: where every byte lies, what a write touches."""

from __future__ import annotations

import pytest
import torch

from mlakit.cache import KVShard, PagedLatentCache
from mlakit.formats import FORMATS, row_codec
from mlakit.model.geometry import MLAGeometry, RowShape
from mlakit.tools.testing import assert_same_bits, assert_unchanged, poison, snapshot
from tests.cache.cache_rows import V3, V4, as_bytes, random_rows


def row_of(format: str) -> RowShape:
    return V4 if format == "fp8_block64" else V3


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
    if codec.beside_dtype is None:
        assert pool.scales is None
    else:
        assert pool.scales.shape == (2, 3, 5, codec.beside_elements)
        assert pool.scales.dtype == codec.beside_dtype
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


@pytest.mark.slow
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


def test_shards_deal_out_positions_in_order():
    for world, interleave in ((1, 1), (2, 1), (3, 2), (4, 16)):
        seen = [0] * world
        for position in range(100):
            owner = KVShard(0, world, interleave).owner(position)
            shard = KVShard(owner, world, interleave)
            assert shard.local_position(position) == seen[owner] == shard.local_count(position)
            seen[owner] += 1
        positions = torch.arange(100)
        shard = KVShard(world - 1, world, interleave)
        own = positions[shard.owner(positions) == shard.rank]
        assert shard.local_position(own).tolist() == list(range(len(own)))
