"""`CacheLayer.write` and `read`: padding is skipped, everything else that is wrong is named."""

from __future__ import annotations

import re
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from mlakit import PageAllocator
from mlakit.cache import CacheLayer, PagedLatentCache
from mlakit.cache.layouts import bits
from mlakit.dispatch import knobs
from mlakit.dispatch.checks import UnsupportedError
from mlakit.formats import FORMATS
from mlakit.tools.testing import assert_same_bits, assert_unchanged, poison, snapshot
from tests.cache.cache_rows import V3, V4, random_rows

NUM_SLOTS = 12


def pool_of(format: str = "bf16", device: torch.device | str = "cpu") -> PagedLatentCache:
    """Four pages of three rows, all of them poison."""
    row = V4 if format == "fp8_block64" else V3
    pool = PagedLatentCache.allocate(
        row, format, num_pages=4, page_size=3, num_layers=2, device=device
    )
    for tensor in tensors_of(pool).values():
        poison(tensor)
    return pool


def tensors_of(pool: PagedLatentCache | CacheLayer) -> dict[str, Tensor]:
    tensors = {"payload": pool.payload, "beside": pool.beside}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.fixture(params=["seen", "unseen"])
def visibility(request):
    """Slots whose values the host looks at, as on the CPU; and slots it may not look at."""
    if request.param == "seen":
        yield
        return
    with mock.patch("mlakit.cache.pool.values_visible", return_value=False):
        yield


PADDED = {
    "first": [-1, 4, 11, 0],
    "last": [4, 11, 0, -1],
    "several": [-1, 0, -1, -1, 7, -1],
    "one": [5, -1],
    "all": [-1, -1, -1],
    "none": [3, 1],
}


@pytest.mark.parametrize("slots", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.usefixtures("visibility")
def test_slot_minus_one_is_skipped(format, slots, dtype, device, generator):
    pool = pool_of(format, device)
    rows = random_rows(len(slots), pool.row, generator)
    rows[[slot < 0 for slot in slots]] = torch.nan  # padding may be anything
    before = snapshot(**tensors_of(pool))
    pool.layer(1).write(torch.tensor(slots, dtype=dtype).to(device), rows.to(device))

    kept = [i for i, slot in enumerate(slots) if slot >= 0]
    where = torch.tensor([slots[i] for i in kept], dtype=torch.int64)
    written = torch.zeros(2, 4, 3, dtype=torch.bool)
    written[1].view(-1)[where] = True
    assert_unchanged(before, written=dict.fromkeys(tensors_of(pool), written.to(device)))
    expected = pool.codec.decode(*pool.codec.encode(rows[kept].to(device)))
    assert_same_bits("rows", pool.layer(1).read(where.to(device)), expected)


def test_a_grid_of_slots_takes_a_grid_of_rows(generator):
    layer = pool_of().layer(0)
    slots = torch.tensor([[3, -1, 5], [9, 0, 2]])
    rows = random_rows(6, V3, generator).view(2, 3, 576)
    layer.write(slots, rows)
    assert_same_bits("rows", layer.read(slots[1]), rows[1].bfloat16().float())
    layer.write(torch.tensor(7), rows[0, 1])
    assert_same_bits("a row", layer.read(torch.tensor(7)), rows[0, 1].bfloat16().float())


@pytest.mark.usefixtures("visibility")
def test_no_slots_are_fine_even_without_pages(device):
    pool = PagedLatentCache.wrap(torch.zeros(0, 3, 576, device=device), V3)
    nowhere = torch.empty(0, dtype=torch.int64, device=device)
    pool.layer(0).write(nowhere, torch.empty(0, 576, device=device))
    assert pool.layer(0).read(nowhere).shape == (0, 576)


class Refusal(NamedTuple):
    name: str
    slots: object
    rows: object
    error: type[Exception]
    message: str

    def __str__(self) -> str:
        return self.name


ROW = torch.zeros(1, 576)
TWO = torch.zeros(2, 576)
ONE_SLOT = torch.tensor([3])

SLOT_REFUSALS = [
    Refusal("list", [3], ROW, TypeError, "slots must be a tensor, got list"),
    Refusal("number", 3, ROW, TypeError, "slots must be a tensor, got int"),
    Refusal("None", None, ROW, TypeError, "slots must be a tensor, got NoneType"),
    *(
        Refusal(
            str(dtype),
            torch.tensor([1], dtype=dtype),
            ROW,
            TypeError,
            f"slots must be int32 or int64, got {str(dtype).removeprefix('torch.')}",
        )
        for dtype in (torch.bool, torch.float32, torch.uint8, torch.int16)
    ),
    Refusal("meta", torch.tensor([3], device="meta"), ROW, ValueError, "slots must be on a device"),
]
VALUE_REFUSALS = [
    Refusal("too-large", torch.tensor([0, 12]), TWO, ValueError, "slots[1] must be in [0, 12)"),
    Refusal("negative", torch.tensor([-2, 0]), TWO, ValueError, "slots[0] must be in [0, 12)"),
    Refusal("huge", torch.tensor([2**40]), ROW, ValueError, f", got {2**40}"),
    Refusal(
        "in-a-grid",
        torch.tensor([[0, 1], [99, 2]]),
        torch.zeros(2, 2, 576),
        ValueError,
        "slots[1, 0] must be in [0, 12)",
    ),
    Refusal("scalar", torch.tensor(12), torch.zeros(576), ValueError, "slots must be in [0, 12)"),
]
ROW_REFUSALS = [
    Refusal(
        "one-row-for-two-slots",
        torch.tensor([1, 2]),
        ROW,
        ValueError,
        "rows must have shape (2, 576), one row per slot, got (1, 576)",
    ),
    Refusal(
        "a-row-without-axis",
        ONE_SLOT,
        torch.zeros(576),
        ValueError,
        "rows must have shape (1, 576), one row per slot, got (576,)",
    ),
    Refusal("two-rows-for-one", ONE_SLOT, TWO, ValueError, "rows must have shape (1, 576)"),
    Refusal("no-rows", ONE_SLOT, torch.zeros(0, 576), ValueError, "rows must have shape (1, 576)"),
    Refusal("narrow", ONE_SLOT, torch.zeros(1, 575), ValueError, "got (1, 575)"),
    Refusal("one-column", ONE_SLOT, torch.zeros(1, 1), ValueError, "got (1, 1)"),
    Refusal("list-of-rows", ONE_SLOT, [[0.0]], TypeError, "rows must be a tensor, got list"),
    Refusal(
        "integers",
        ONE_SLOT,
        torch.zeros(1, 576, dtype=torch.int32),
        TypeError,
        "rows must be of a floating-point dtype, got int32",
    ),
    Refusal("meta-rows", ONE_SLOT, ROW.to("meta"), ValueError, "rows must be on a device"),
    Refusal(
        "twice",
        torch.tensor([5, -1, 3, 5, -1]),
        torch.zeros(5, 576),
        ValueError,
        "slots must be unique, got 5 in slots[0] and slots[3]",
    ),
]


@pytest.mark.parametrize("refusal", [*SLOT_REFUSALS, *VALUE_REFUSALS, *ROW_REFUSALS], ids=str)
@pytest.mark.parametrize("format", ["bf16", "fp8_token"])
def test_a_write_that_is_refused_is_named_and_writes_nothing(refusal, format):
    pool = pool_of(format)
    before = snapshot(**tensors_of(pool))
    with pytest.raises(refusal.error, match=re.escape(refusal.message)) as caught:
        pool.layer(0).write(refusal.slots, refusal.rows)
    assert str(caught.value).startswith("CacheLayer.write: ")
    assert_unchanged(before)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["bf16", "fp8_token"])
@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_rows_with_a_derivative_are_not_written(mode, format):
    """What is read again would have none."""
    layer = pool_of(format).layer(0)
    before = snapshot(**tensors_of(layer))
    slots, rows = torch.tensor([2, 5]), torch.randn(2, 576)

    def write(rows: Tensor) -> Tensor:
        layer.write(slots, rows)
        return layer.read(slots)

    if mode == "backward":
        with pytest.raises(
            UnsupportedError, match=r"^CacheLayer.write: rows must not require grad"
        ):
            write(rows.clone().requires_grad_())
    else:
        with pytest.raises(UnsupportedError, match=r"^CacheLayer.write: rows must not have a tang"):
            torch.func.jvp(write, (rows,), (rows,))
    assert_unchanged(before)
    with torch.no_grad():
        write(rows.clone().requires_grad_())


@pytest.mark.parametrize(
    ("blocks", "axis"),
    [(torch.zeros(1, 3, 576).expand(4, 3, 576), 0), (torch.zeros(4, 1, 576).expand(4, 3, 576), 1)],
    ids=["pages", "rows"],
)
def test_a_write_to_rows_at_one_address_is_refused(blocks, axis, visibility):
    """A read is right; a write would change other rows."""
    layer = PagedLatentCache.wrap(blocks, V3).layer(0)
    said = (
        "CacheLayer.write: the payload of the layer must be writable, "
        f"got stride 0 on axis {axis} (an expanded tensor)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        layer.write(ONE_SLOT, torch.ones(1, 576))
    assert not layer.read(torch.arange(NUM_SLOTS)).any()


def test_a_write_to_rows_that_share_memory_is_refused(visibility):
    blocks = torch.zeros(4 * 3 * 576).as_strided((4, 3, 576), (576, 576, 1))
    layer = PagedLatentCache.wrap(blocks, V3).layer(0)
    with pytest.raises(ValueError, match=r"the layer must be writable, got .* share memory$"):
        layer.write(ONE_SLOT, torch.ones(1, 576))
    assert not layer.read(torch.arange(NUM_SLOTS)).any()


@pytest.mark.parametrize("refusal", [*SLOT_REFUSALS, *VALUE_REFUSALS], ids=str)
def test_a_read_that_is_refused_is_named(refusal):
    with pytest.raises(refusal.error, match=re.escape(refusal.message)) as caught:
        pool_of().layer(0).read(refusal.slots)
    assert str(caught.value).startswith("CacheLayer.read: ")


def test_reading_slot_minus_one_is_refused():
    with pytest.raises(ValueError, match=re.escape("slots[1] must be in [0, 12), got -1")):
        pool_of().layer(0).read(torch.tensor([3, -1]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, "float32", None], ids=str)
def test_rows_are_read_as_floats(dtype):
    with pytest.raises(TypeError, match=r"CacheLayer.read: dtype must be bfloat16, float16"):
        pool_of().layer(0).read(ONE_SLOT, dtype)


def test_a_pool_on_meta_has_no_rows():
    layer = PagedLatentCache.allocate(V3, num_pages=1, device="meta").layer(0)
    for call in (lambda: layer.read(ONE_SLOT), lambda: layer.write(ONE_SLOT, ROW)):
        with pytest.raises(ValueError, match="the cache must be on a device that holds data"):
            call()


@pytest.mark.parametrize("format", FORMATS)
def test_slots_outside_are_not_touched_where_they_cannot_be_seen(format, device, generator):
    pool = pool_of(format, device)
    layer = pool.layer(1)
    slots = torch.tensor([12, -2, 7, -1, 2**40, -(2**40), 2], device=device)
    rows = random_rows(7, pool.row, generator).to(device)
    before = snapshot(**tensors_of(pool))
    with mock.patch("mlakit.cache.pool.values_visible", return_value=False):
        layer.write(slots, rows)
        read = layer.read(slots)
    written = torch.zeros(2, 4, 3, dtype=torch.bool)
    written[1].view(-1)[[7, 2]] = True
    assert_unchanged(before, written=dict.fromkeys(tensors_of(pool), written.to(device)))
    inside = [2, 6]
    expected = pool.codec.decode(*pool.codec.encode(rows[inside]))
    assert_same_bits("rows", read[inside], expected)
    assert read[[0, 1, 3, 4, 5]].isnan().all()


@pytest.mark.gpu
def test_slots_on_a_gpu_are_skipped_without_a_synchronisation_and_checked_when_asked():
    pool = pool_of("fp8_token", "cuda")
    slots, rows = torch.tensor([3, -1, 40], device="cuda"), torch.zeros(3, 576, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pool.layer(0).write(slots, rows)
        pool.layer(0).read(slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with (
        knobs.override(check_values=True),
        pytest.raises(ValueError, match=re.escape("slots[2] must be in [0, 12) or -1")),
    ):
        pool.layer(0).write(slots, rows)
    with pytest.raises(ValueError, match="slots must be on the device of the cache, cuda:0"):
        pool.layer(0).write(slots.cpu(), rows)


@pytest.mark.parametrize("format", ["bf16", "fp8_token", "fp8_block64"])
def test_copies_of_an_allocator_move_every_row_of_every_layer(format):
    pages = PageAllocator(4, 3)
    copies = pages.append(pages.fork(pages.reserve(5)), 1)
    assert [tuple(copy) for copy in copies] == [(1, 2, 2)]
    pool = pool_of(format)
    for tensor in tensors_of(pool).values():
        bits(tensor).random_(1, 100)
    expected = {name: tensor.clone() for name, tensor in tensors_of(pool).items()}
    for tensor in expected.values():
        bits(tensor)[:, 2] = bits(tensor)[:, 1]
    pool.copy_pages([])
    pool.copy_pages(iter(copies))
    for name, tensor in tensors_of(pool).items():
        assert_same_bits(name, tensor, expected[name])


@pytest.mark.parametrize(
    ("copies", "error", "message"),
    [
        ([0, 2], TypeError, "copies[0] must be a PageCopy or a pair (source, target), got 0"),
        (["01"], TypeError, "copies[0] must be a PageCopy or a pair (source, target), got '01'"),
        ([(0,)], TypeError, "copies[0] must be a PageCopy or a pair (source, target), got (0,)"),
        ([(4, 0)], ValueError, "the source of copies[0] must be below the 4 pages of the pool"),
        ([(0, -1)], ValueError, "the target of copies[0] must be at least 0, got -1"),
        (
            [(0, 2), (1, 2)],
            ValueError,
            "the target of copies[1] must not be a source or another target, got 2",
        ),
        (
            [(0, 2), (1, 0)],
            ValueError,
            "the target of copies[1] must not be a source or another target, got 0",
        ),
        ([(0.0, 1)], TypeError, "the source of copies[0] must be an integer, got float"),
        ([(True, 2)], TypeError, "the source of copies[0] must be an integer, got bool"),
    ],
)
def test_pages_that_cannot_be_copied_are_named(copies, error, message):
    pool = pool_of("fp8_token")
    before = snapshot(**tensors_of(pool))
    with pytest.raises(error, match=re.escape(f"PagedLatentCache.copy_pages: {message}")):
        pool.copy_pages(copies)
    assert_unchanged(before)
