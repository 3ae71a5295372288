"""A pool as a holder of tensors: moved, cloned, zeroed, measured."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.formats import FORMATS, SPLIT_FORMATS, row_codec
from mlakit.model.geometry import RowShape
from mlakit.tools.testing import assert_same_bits, assert_unchanged, poison, snapshot
from tests.cache.cache_rows import V3, V4, as_bytes, random_rows
from tests.ops.cases import decode_call

SLOTS = torch.arange(6)


def row_of(format: str) -> RowShape:
    return V4 if format == "fp8_block64" else V3


def filled(format: str, **options: object) -> PagedLatentCache:
    pool = PagedLatentCache.allocate(
        row_of(format), format, num_pages=2, page_size=3, num_layers=2, **options
    )
    return fill(pool)


def fill(pool: PagedLatentCache) -> PagedLatentCache:
    generator = torch.Generator().manual_seed(0)
    for index in range(pool.num_layers):
        pool.layer(index).write(SLOTS, random_rows(6, pool.row, generator))
    return pool


def wrapped(format: str) -> PagedLatentCache:
    """A pool of two layers in memory with poison between rows, pages and layers."""
    codec = row_codec(format, row_of(format))
    columns = codec.payload_elements
    memory = poison(torch.empty(3, 1, 4, 5, 1, columns + 16, dtype=codec.payload_dtype))
    scales = None
    if codec.beside_dtype is not None:
        scales = poison(torch.empty(3, 1, 4, 5, 1, codec.beside_elements + 3))
        scales = scales[1:, :, 1:3, 1:4, :, :1]
    blocks = memory[1:, :, 1:3, 1:4, :, :columns]
    return fill(PagedLatentCache.wrap(blocks, codec.row, format=format, scales=scales))


def wrapped_footers() -> PagedLatentCache:
    """Pages further apart than they need to be, the second layer's between the first one's."""
    memory = poison(torch.empty(2, 2, 4000, dtype=torch.uint8))
    blocks = memory.as_strided((2, 1, 2, 3, 1, 584), (8000, 4000, 4000, 584, 584, 1))
    return fill(PagedLatentCache.wrap(blocks, V4))


POOLS = {
    **{format: lambda format=format: filled(format) for format in FORMATS},
    **{format: lambda format=format: filled(format) for format in SPLIT_FORMATS},
    "bf16-padded": lambda: wrapped("bf16"),
    "fp8_token-padded": lambda: wrapped("fp8_token"),
    "fp8_block64-padded": wrapped_footers,
    "index-keys": lambda: fill(
        PagedLatentCache.wrap_index_keys(poison(torch.empty(2, 3, 132, dtype=torch.uint8)))
    ),
}
every_pool = pytest.mark.parametrize("make", POOLS.values(), ids=POOLS)


def rows_of(pool: PagedLatentCache) -> list[Tensor]:
    return [
        layer.read(SLOTS.to(pool.device)).cpu() for layer in map(pool.layer, range(pool.num_layers))
    ]


def assert_rows(pool: PagedLatentCache, expected: list[Tensor]) -> None:
    for index, (got, want) in enumerate(zip(rows_of(pool), expected, strict=True)):
        assert_same_bits(f"layer {index}", got, want)


def memory_of(pool: PagedLatentCache) -> dict[str, Tensor]:
    """All bytes that the tensors of a pool lie in, those between rows too."""
    tensors = {"payload": pool.payload, "beside": pool.beside}
    return {
        name: torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        for name, tensor in tensors.items()
        if tensor is not None
    }


@every_pool
def test_a_clone_has_the_rows_in_packed_memory_of_its_own(make):
    pool = make()
    before = rows_of(pool)
    again = pool.clone()
    assert_rows(again, before)
    like = PagedLatentCache.allocate(
        pool.row,
        pool.format,
        num_pages=pool.num_pages,
        page_size=pool.page_size,
        num_layers=pool.num_layers,
    )
    for name in ("payload", "beside"):
        got, want = getattr(again, name), getattr(like, name)
        if want is not None:
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
            assert got.untyped_storage().nbytes() == want.untyped_storage().nbytes()
            assert got.storage_offset() == want.storage_offset()
    memory = snapshot(**memory_of(pool))
    fill(again.zero_())
    again.layer(0).write(SLOTS, torch.ones(6, pool.row.width))
    assert_unchanged(memory)


def test_the_footers_of_a_clone_follow_its_rows():
    again = wrapped_footers().clone()
    assert again.scales.untyped_storage()._cdata == again.payload.untyped_storage()._cdata
    assert again.payload.stride(1) == 4 * 576  # 3 · 584 bytes, padded to a multiple of 576
    # seen as an engine sees it: rows, then footers, in pages of 584 bytes a row
    blocks = again.payload.as_strided((2, 3, 584), (4 * 576, 584, 1))
    assert_same_bits(
        "rows", PagedLatentCache.wrap(blocks, V4).layer(0).read(SLOTS), rows_of(again)[0]
    )
    padding = again.payload.as_strided((4, 4 * 576 - 3 * 584), (4 * 576, 1), 3 * 584)
    assert not padding.any()


@pytest.mark.parametrize("format", [*FORMATS, *SPLIT_FORMATS])
def test_a_grown_pool_keeps_its_rows_and_has_empty_pages(format):
    pool = filled(format)
    before = snapshot(payload=pool.payload)
    grown = pool.grown(5)
    assert (grown.num_pages, grown.num_layers, grown.page_size) == (5, 2, 3)
    assert grown.payload.data_ptr() != pool.payload.data_ptr()
    assert grown.tensor_scale is pool.tensor_scale
    empty = PagedLatentCache.allocate(row_of(format), format, num_pages=5, page_size=3)
    for index in range(2):
        assert_same_bits("rows", grown.layer(index).read(SLOTS), pool.layer(index).read(SLOTS))
        for mine, other in (
            (grown.layer(index).payload, empty.layer(0).payload),
            (grown.layer(index).scales, empty.layer(0).scales),
        ):
            if mine is not None:
                assert_same_bits("new pages", as_bytes(mine[2:]), as_bytes(other[2:]))
    grown.layer(0).write(torch.tensor([14]), torch.ones(1, grown.row.width))
    assert_unchanged(before)


def test_a_pool_does_not_shrink():
    message = "^PagedLatentCache.grown: num_pages must not be below the 2 pages of the pool, got 1$"
    with pytest.raises(ValueError, match=message):
        filled("bf16").grown(1)


@pytest.mark.parametrize("format", sorted({*FORMATS} - {"fp16"}))  # whose queries are fp16
def test_a_clone_decodes_like_its_original(format):
    call = decode_call(format, padded=format not in ("fp8_token", "fp8_block64"))
    again = call.but(cache=call.arguments["cache"].clone())
    for got, want in zip(again.run(), call.run(), strict=True):
        assert_same_bits("result", got, want)


def test_scales_with_pages_of_their_own_keep_them():
    pool = filled("fp8_token")
    more = torch.ones(2, 5, 3, 1)
    again = PagedLatentCache(pool.codec, pool.payload, more).clone()
    assert again.scales.shape == (2, 5, 3, 1)


def test_a_scale_tensor_is_cloned_and_a_number_kept():
    scale = torch.tensor(2.5)
    again = filled("fp8", tensor_scale=scale).clone()
    scale.fill_(9.0)
    assert again.tensor_scale == 2.5
    assert filled("fp8", tensor_scale=2.5).clone().tensor_scale == 2.5


@every_pool
def test_bytes_are_those_of_rows_and_scales(make):
    pool = make()
    tokens = pool.num_layers * pool.num_pages * pool.page_size
    assert pool.nbytes == tokens * pool.codec.bytes_per_token
    assert pool.clone().nbytes == pool.nbytes


@every_pool
def test_zero_empties_rows_and_scales_and_nothing_else(make):
    pool = make()
    between = {name: memory.clone() for name, memory in memory_of(pool).items()}
    views = {"payload": pool.payload, "beside": pool.beside}
    views = {name: view for name, view in views.items() if view is not None}
    assert pool.zero_() is pool
    for view in views.values():
        assert not as_bytes(view).any()
        view.view(torch.uint8).fill_(7)
    for name, view in views.items():  # with the rows marked, all else is as it was
        for other, memory in between.items():
            if memory_of(pool)[other].data_ptr() == memory_of(pool)[name].data_ptr():
                marked = memory.view(view.dtype).as_strided(
                    view.shape, view.stride(), view.storage_offset()
                )
                marked.view(torch.uint8).fill_(7)
    for name, memory in between.items():
        assert_same_bits(name, memory_of(pool)[name], memory)


def test_zero_leaves_the_tensor_scale():
    assert filled("fp8", tensor_scale=torch.tensor(2.5)).zero_().tensor_scale == 2.5


@every_pool
def test_a_pool_that_is_there_already_is_not_copied(make):
    pool = make()
    for device in ("cpu", torch.device("cpu")):
        assert pool.to(device) is pool


@every_pool
def test_a_pool_moves_with_all_it_has(make):
    pool = make()
    there = pool.to("meta")
    assert (there.device.type, pool.device.type) == ("meta", "cpu")
    assert (there.codec, there.nbytes) == (pool.codec, pool.nbytes)
    if there.scales is not None:
        assert there.scales.device.type == "meta"


def test_a_scale_tensor_moves_too():
    pool = filled("fp8", tensor_scale=torch.tensor(2.5))
    assert pool.to("meta").tensor_scale.device.type == "meta"
    apart = PagedLatentCache(pool.codec, pool.payload, None, torch.tensor(2.5, device="meta"))
    here = apart.to("meta").to("meta")
    assert here.tensor_scale.device.type == "meta"
    elsewhere = PagedLatentCache(pool.codec, pool.payload.to("meta"), None, torch.tensor(2.5))
    moved = elsewhere.to("meta")
    assert moved is not elsewhere
    assert moved.payload is elsewhere.payload  # which was there
    assert moved.tensor_scale.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.parametrize("non_blocking", [False, True])
@every_pool
def test_a_pool_goes_to_a_gpu_and_back(make, non_blocking):
    pool = make()
    there = pool.to("cuda", non_blocking=non_blocking)
    assert there.device == torch.device("cuda", torch.cuda.current_device())
    assert there.to("cuda") is there
    assert_rows(there, rows_of(pool))
    assert_rows(there.to("cpu"), rows_of(pool))
    assert_rows(there.clone(), rows_of(pool))


@pytest.mark.parametrize(
    ("wrong", "got"), [(torch.float32, "dtype"), (None, "NoneType"), (True, "bool"), ([], "list")]
)
def test_a_pool_goes_to_devices_only(wrong, got):
    message = f"PagedLatentCache.to: device must be a device or its name, got {got}"
    with pytest.raises(TypeError, match=re.escape(message)):
        filled("bf16").to(wrong)
