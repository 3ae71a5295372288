"""Views of a pool's layers: the same object while the pool is what it was, never a stale one."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mlakit
from mlakit.cache import CacheLayer, PagedLatentCache
from mlakit.formats import FORMATS
from mlakit.tools.testing import assert_same_bits
from tests.cache.cache_rows import V3, V4, as_bytes, random_rows

SLOTS = torch.arange(6)


def filled(format: str, seed: int = 0, **options: object) -> PagedLatentCache:
    """Two layers of two pages of three rows, all of them written."""
    row = V4 if format == "fp8_block64" else V3
    pool = PagedLatentCache.allocate(row, format, num_pages=2, page_size=3, num_layers=2, **options)
    generator = torch.Generator().manual_seed(seed)
    for index in range(2):
        pool.layer(index).write(SLOTS, random_rows(6, row, generator))
    return pool


def rows_of(pool: PagedLatentCache) -> list[Tensor]:
    return [pool.layer(index).read(SLOTS) for index in range(2)]


def assert_rows(pool: PagedLatentCache, expected: list[Tensor]) -> None:
    for index, (rows, want) in enumerate(zip(rows_of(pool), expected, strict=True)):
        assert_same_bits(f"layer {index}", rows, want)


def replace_attribute(pool: PagedLatentCache, other: PagedLatentCache) -> None:
    object.__setattr__(pool, "payload", other.payload)


def replace_data(pool: PagedLatentCache, other: PagedLatentCache) -> None:
    pool.payload.data = other.payload


def replace_storage(pool: PagedLatentCache, other: PagedLatentCache) -> None:
    pool.payload.set_(other.payload)


REPLACEMENTS = [replace_attribute, replace_data, replace_storage]


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_is_the_same_object_each_time(format):
    pool = filled(format)
    assert pool.layer(1) is pool.layer(1) is pool.find_layer(1)
    assert pool.layer(0) is not pool.layer(1)
    assert pool.find_layer(2) is pool.find_layer(-1) is None


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_a_replaced_payload_is_seen_by_every_layer(replace):
    pool, other = filled("bf16"), filled("bf16", seed=1)
    rows_of(pool)
    replace(pool, other)
    assert_rows(pool, rows_of(other))
    assert pool.layer(0) is pool.layer(0)


def test_a_payload_that_grows_in_place_is_seen():
    pool = filled("bf16")
    assert pool.layer(0).num_slots == 6
    pool.payload.data = torch.zeros(2, 4, 3, 576, dtype=torch.bfloat16)
    assert pool.layer(0).num_slots == 12
    pool.layer(0).write(torch.tensor([11]), torch.ones(1, 576))
    assert (pool.payload[0, 3, 2] == 1).all()


def test_a_payload_resized_where_it_lies_is_seen():
    pool = filled("bf16")
    first, address = pool.layer(0), pool.payload.data_ptr()
    pool.payload.resize_(2, 1, 3, 576)
    assert pool.payload.data_ptr() == address
    assert pool.layer(0) is not first
    assert pool.layer(0).num_slots == 3


def test_a_payload_with_other_strides_in_the_same_place_is_seen():
    pool = filled("bf16")
    swapped = PagedLatentCache(pool.codec, pool.payload.clone(), None)
    rows_of(pool)
    for each in (pool, swapped):
        each.payload.as_strided_((2, 2, 3, 576), (3 * 576, 2 * 3 * 576, 576, 1))
    assert_rows(pool, rows_of(swapped))


def new_scales(pool: PagedLatentCache) -> None:
    object.__setattr__(pool, "beside", 2 * pool.scales)


def new_scales_in_place(pool: PagedLatentCache) -> None:
    pool.scales.data = 2 * pool.scales


@pytest.mark.parametrize("replace", [new_scales, new_scales_in_place])
def test_new_scales_are_seen(replace):
    pool = filled("fp8_token")
    before = rows_of(pool)
    replace(pool)
    assert_rows(pool, [2 * rows for rows in before])


@pytest.mark.parametrize("scale", [3.0, torch.tensor(3.0)], ids=["number", "tensor"])
def test_a_new_tensor_scale_is_seen(scale):
    pool = filled("fp8")
    before = rows_of(pool)
    object.__setattr__(pool, "tensor_scale", scale)
    assert_rows(pool, [3 * rows for rows in before])


def test_a_payload_that_comes_to_require_grad_is_seen():
    pool = filled("fp32")
    rows_of(pool)
    pool.payload.requires_grad_()
    assert pool.layer(0).payload.requires_grad
    pool.payload.requires_grad_(False)
    assert not pool.layer(0).payload.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("format", ["bf16", "fp8_token", "fp8_block64"])
def test_a_replaced_payload_is_let_go(format):
    pool, other = filled(format), filled(format, seed=1)
    rows_of(pool)
    payload = weakref.ref(pool.payload)
    held = [weakref.ref(pool.layer(index)) for index in range(2)]
    object.__setattr__(pool, "payload", other.payload)
    object.__setattr__(pool, "beside", other.beside)
    gc.collect()
    assert payload() is None
    assert [layer() for layer in held] == [None, None]
    assert_rows(pool, rows_of(other))


@pytest.mark.parametrize("replace", [replace_data, replace_storage])
def test_memory_replaced_in_place_is_let_go_by_the_next_use(replace):
    pool, other = filled("bf16"), filled("bf16", seed=1)
    rows_of(pool)
    old = [weakref.ref(pool.layer(index)) for index in range(2)]
    replace(pool, other)
    pool.layer(0)
    assert [layer() for layer in old] == [None, None]


def test_a_pool_is_let_go_with_its_layers():
    pool = filled("fp8_token")
    rows_of(pool)
    pool.layer(0)
    tensors = [weakref.ref(pool.payload), weakref.ref(pool.layer(0).payload)]
    gc.disable()  # without a cycle for it to find
    try:
        del pool
        assert [tensor() for tensor in tensors] == [None, None]
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_layer_that_is_held_keeps_its_memory():
    pool = filled("bf16")
    layer, before = pool.layer(1), rows_of(pool)[1]
    del pool
    gc.collect()
    assert_same_bits("rows", layer.read(SLOTS), before)


def pickled(pool: PagedLatentCache) -> PagedLatentCache:
    return pickle.loads(pickle.dumps(pool))


def saved(pool: PagedLatentCache) -> PagedLatentCache:
    file = io.BytesIO()
    torch.save(pool, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [pickled, saved, copy.deepcopy]


def share_a_storage(pool: PagedLatentCache) -> bool:
    return pool.payload.untyped_storage()._cdata == pool.scales.untyped_storage()._cdata


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_copy_reads_and_writes_its_own_memory(format, copied):
    pool = filled(format)
    before = rows_of(pool)  # now every layer is known
    again = copied(pool)
    assert_rows(again, before)
    assert again.codec == pool.codec
    again.layer(0).write(SLOTS, torch.ones(6, pool.row.width))
    assert (as_bytes(again.payload[0]) != as_bytes(pool.payload[0])).any()
    assert_rows(pool, before)
    expected = PagedLatentCache(again.codec, again.payload, again.scales, again.tensor_scale)
    assert_rows(again, rows_of(expected))
    if again.scales is not None:
        assert share_a_storage(again) == share_a_storage(pool)
    assert again.payload.stride() == pool.payload.stride()


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_decodes_what_it_holds(copied):
    """Wherever its memory is: here where that of the pool was when it was copied."""
    pool = filled("bf16")
    q = torch.randn(1, 2, 576).bfloat16()
    call = (torch.tensor([[1, 0]]).int(), torch.tensor([5]).int())

    def decode(pool: PagedLatentCache) -> Tensor:
        return mlakit.mla_decode(q, pool, *call, softmax_scale=0.1, layer=1)[0]

    before = decode(pool)
    again = copied(pool)
    again.payload.data = pool.payload
    pool.payload.neg_()
    assert_same_bits("out of new rows", decode(again), decode(pool))
    assert (decode(again) != before).any()


@pytest.mark.parametrize("copied", COPIES)
def test_index_keys_are_copied_with_their_scales(copied):
    pool = PagedLatentCache.wrap_index_keys(torch.zeros(2, 3, 132, dtype=torch.uint8))
    pool.layer(0).write(SLOTS, torch.randn(6, 128))
    again = copied(pool)
    assert_same_bits("keys", again.layer(0).read(SLOTS), pool.layer(0).read(SLOTS))
    assert share_a_storage(again)


def test_a_shallow_copy_shares_the_tensors_and_knows_no_layers():
    pool = filled("fp8_block64")
    rows_of(pool)
    again = copy.copy(pool)
    assert again.payload is pool.payload
    assert again.scales is pool.scales
    assert set(vars(again)) == {field.name for field in fields(pool)}
    assert again.layer(0) is not pool.layer(0)


@pytest.mark.parametrize("copied", [copy.copy, *COPIES])
def test_what_is_kept_with_a_layer_is_not_copied_with_it(copied: Callable[[CacheLayer], object]):
    layer = filled("fp8_block64").layer(1)
    vars(layer)["_flat"] = 1, [layer.payload]  # what a repeated call keeps there
    again = copied(layer)
    assert set(vars(again)) == {field.name for field in fields(CacheLayer)}
    assert_same_bits("rows", again.read(SLOTS), layer.read(SLOTS))
    assert share_a_storage(again)


def test_a_view_made_under_fake_tensors_is_not_kept():
    pool = filled("bf16")
    fresh = PagedLatentCache(pool.codec, pool.payload, None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fresh.layer(0)
    assert type(fresh.layer(0).payload) is Tensor
    assert_rows(fresh, rows_of(pool))


def test_a_view_of_a_fake_pool_is_fake():
    with FakeTensorMode():
        pool = PagedLatentCache.allocate(V3, "fp8_token", num_pages=2, page_size=3)
        assert pool.layer(0).payload.shape == (2, 3, 640)


def test_writing_a_layer_is_seen_by_autograd():
    pool = filled("bf16")
    before = pool.payload._version
    pool.layer(0).write(SLOTS, torch.zeros(6, 576))
    assert pool.payload._version > before
