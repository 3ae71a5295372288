"""Pools whose latent and rotated columns are two tensors of another engine."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.formats import SPLIT_FORMATS, row_codec
from mlakit.model.geometry import RowShape
from mlakit.tools.testing import assert_same_bits, poison
from tests.cache.cache_rows import random_rows

ROW = RowShape(32, 8)
PAGES, PAGE_SIZE = 4, 3
SLOTS = torch.tensor([7, 0, 11, 4])
DTYPES = {
    "bf16_split": torch.bfloat16,
    "fp16_split": torch.float16,
    "fp32_split": torch.float32,
    "fp8_split": torch.float8_e4m3fn,
}


def columns(width: int, dtype: torch.dtype = torch.bfloat16, padding: int = 0) -> Tensor:
    """Poison [pages, page_size, width], with unused elements after each row and each page."""
    memory = poison(torch.empty(PAGES, PAGE_SIZE + bool(padding), width + padding, dtype=dtype))
    return memory[:, :PAGE_SIZE, :width]


def halves(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return columns(32, dtype, padding=5), columns(8, dtype, padding=3)


@pytest.mark.parametrize("format", SPLIT_FORMATS)
def test_rows_are_written_and_read_in_both_tensors(format):
    ckv, kpe = halves(DTYPES[format])
    scale = 0.25 if format == "fp8_split" else 1.0
    cache = PagedLatentCache.wrap_split(ckv, kpe, tensor_scale=scale)
    assert (cache.format, cache.row, cache.num_layers) == (format, ROW, 1)
    assert (cache.num_pages, cache.page_size) == (PAGES, PAGE_SIZE)
    layer, rows = cache.layer(0), random_rows(4, ROW, torch.Generator().manual_seed(0))
    layer.write(SLOTS, rows)
    latent, rope = row_codec(format, ROW).encode(rows, tensor_scale=scale)
    at = SLOTS // PAGE_SIZE, SLOTS % PAGE_SIZE
    bits = torch.uint8 if format == "fp8_split" else ckv.dtype
    assert_same_bits("ckv", ckv.view(bits)[at], latent.view(bits))
    assert_same_bits("kpe", kpe.view(bits)[at], rope.view(bits))
    stored = row_codec(format, ROW).decode(latent, rope, tensor_scale=scale)
    assert_same_bits("rows", layer.read(SLOTS), stored)
    others = torch.tensor(sorted({*range(PAGES * PAGE_SIZE)} - {*SLOTS.tolist()}))
    assert layer.read(others).isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_bytes_are_e4m3(dtype):
    ckv, kpe = (each.view(dtype) for each in halves(torch.float8_e4m3fn))
    cache = PagedLatentCache.wrap_split(ckv, kpe)
    assert (cache.format, cache.payload.dtype) == ("fp8_split", torch.float8_e4m3fn)
    assert cache.rope.data_ptr() == kpe.data_ptr()


def test_a_layer_has_the_tensors_and_no_scales():
    ckv, kpe = halves()
    layer = PagedLatentCache.wrap_split(ckv, kpe).layer(0)
    assert layer.scales is None
    assert (layer.payload.data_ptr(), layer.rope.data_ptr()) == (ckv.data_ptr(), kpe.data_ptr())
    assert (layer.payload.stride(), layer.rope.stride()) == (ckv.stride(), kpe.stride())
    assert PagedLatentCache.allocate(ROW, "bf16", num_pages=1).rope is None
    assert "rope=bfloat16 [4, 3, 8] on cpu" in repr(layer)


def test_views_of_joined_rows_become_joined_rows():
    blocks = columns(40, padding=5)
    cache = PagedLatentCache.wrap_split(blocks[..., :32], blocks[..., 32:])
    assert (cache.format, cache.row) == ("bf16", ROW)
    assert (cache.payload[0].data_ptr(), cache.payload[0].shape, cache.payload[0].stride()) == (
        *(blocks.data_ptr(), blocks.shape, blocks.stride()),
    )


def test_no_rotated_columns_make_joined_rows():
    cache = PagedLatentCache.wrap_split(columns(32), columns(0))
    assert (cache.format, cache.row, cache.beside) == ("bf16", RowShape(32, 0), None)


APART = {
    "rope first": lambda blocks: (blocks[..., 8:], blocks[..., :8]),
    "columns between": lambda blocks: (blocks[..., :24], blocks[..., 32:]),
    "pages alternate": lambda blocks: (blocks[::2, :, :32], blocks[1::2, :, 32:]),
    "one behind the other": lambda blocks: (blocks[:2], blocks[2:]),
    "rows alternate": lambda blocks: (blocks[:, ::2][:, :1], blocks[:, 1::2]),
}


@pytest.mark.parametrize("views", APART.values(), ids=APART)
def test_tensors_that_alternate_in_memory_are_taken(views):
    ckv, kpe = views(columns(40, padding=4))
    cache = PagedLatentCache.wrap_split(ckv, kpe)
    assert cache.format == "bf16_split"
    rows = random_rows(1, cache.row, torch.Generator().manual_seed(0)).bfloat16().float()
    for slot in range(cache.layer(0).num_slots):
        cache.layer(0).write(torch.tensor([slot]), rows + slot)
    for slot in range(cache.layer(0).num_slots):
        assert_same_bits(
            "row", cache.layer(0).read(torch.tensor([slot])), (rows + slot).bfloat16().float()
        )


@pytest.mark.parametrize("format", SPLIT_FORMATS)
def test_pages_are_copied_in_both_tensors(format):
    ckv, kpe = halves(DTYPES[format])
    cache = PagedLatentCache.wrap_split(ckv, kpe)
    layer = cache.layer(0)
    rows = random_rows(PAGE_SIZE, ROW, torch.Generator().manual_seed(0))
    layer.write(torch.arange(PAGE_SIZE), rows)
    cache.copy_pages([(0, 2)])
    want = layer.read(torch.arange(PAGE_SIZE))
    assert_same_bits("copy", layer.read(torch.arange(2 * PAGE_SIZE, 3 * PAGE_SIZE)), want)
    assert layer.read(torch.arange(PAGE_SIZE, 2 * PAGE_SIZE)).isnan().all()
    again = pickle.loads(pickle.dumps(cache))
    assert_same_bits("pickled", again.layer(0).read(torch.arange(PAGE_SIZE)), want)
    assert again.format == format


class Refusal(NamedTuple):
    name: str
    call: Callable[[], object]
    error: type[Exception]
    message: str


def wrap(ckv: object = None, kpe: object = None, **options: object) -> object:
    ckv = columns(32) if ckv is None else ckv
    return PagedLatentCache.wrap_split(ckv, columns(8) if kpe is None else kpe, **options)


def shifted(by: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Latents, and rope columns that begin so many elements behind them, at other steps."""
    memory = torch.zeros(1000, dtype=dtype)
    return memory[: 4 * 3 * 32].view(4, 3, 32), memory[by:][: 4 * 3 * 8].view(4, 3, 8)


REFUSALS = [
    Refusal(
        *("pages", lambda: wrap(kpe=columns(8)[:3]), ValueError),
        "kpe.shape[0] (pages) must equal ckv.shape[0], 4, got 3",
    ),
    Refusal(
        *("page-size", lambda: wrap(kpe=columns(8)[:, :2]), ValueError),
        "kpe.shape[1] (page_size) must equal ckv.shape[1], 3, got 2",
    ),
    Refusal(
        *("axes", lambda: wrap(ckv=columns(32)[:, :, None]), ValueError),
        "ckv must have axes (pages, page_size, D_C), got shape (4, 3, 1, 32)",
    ),
    Refusal(
        *("no-tensor", lambda: wrap(kpe=3), TypeError),
        "kpe must be a tensor, got int",
    ),
    Refusal(
        *("dtypes", lambda: wrap(kpe=columns(8).half()), TypeError),
        "kpe must have the dtype of ckv, bfloat16, got float16",
    ),
    Refusal(
        *("dtype", lambda: wrap(ckv=columns(32).double()), TypeError),
        "ckv must be bfloat16 or float16 or float32 or uint8 or int8 or float8_e4m3fn, got float64",
    ),
    Refusal(
        *("meta", lambda: wrap(kpe=torch.zeros(4, 3, 8, device="meta")), ValueError),
        "kpe must be on a device that holds data, got a meta tensor",
    ),
    Refusal(
        *("strided-ckv", lambda: wrap(ckv=columns(64)[..., ::2]), ValueError),
        "ckv must have a contiguous last axis, got strides (192, 64, 2)",
    ),
    Refusal(
        *("strided-kpe", lambda: wrap(kpe=columns(16)[..., ::2]), ValueError),
        "kpe must have a contiguous last axis, got strides (48, 16, 2)",
    ),
    Refusal(
        *("no-columns", lambda: wrap(ckv=columns(0)), ValueError),
        "ckv must have at least one column, got 0",
    ),
    Refusal(
        *("odd-columns", lambda: wrap(kpe=columns(7)), ValueError),
        "kpe must have an even number of columns, got 7",
    ),
    Refusal(
        *("no-rows", lambda: wrap(columns(32)[:, :0], columns(8)[:, :0]), ValueError),
        "ckv must have a page size of at least 1, got 0",
    ),
    *(
        Refusal(
            *(f"overlap-{by}", lambda by=by: wrap(*shifted(by)), ValueError),
            "kpe must share no memory with ckv, got ckv [shape (4, 3, 32), strides (96, 32, 1)] "
            f"and kpe [shape (4, 3, 8), strides (24, 8, 1)] {2 * by} bytes behind it",
        )
        for by in (0, 8, 383)
    ),
    Refusal(
        *(
            "overlap-columns",
            lambda: (lambda x: wrap(x[..., :32], x[..., 30:38]))(columns(40)),
            ValueError,
        ),
        "kpe must share no memory with ckv",
    ),
    Refusal(
        *("tensor-scale", lambda: wrap(tensor_scale=2.0), ValueError),
        "tensor_scale must be left at 1.0 for format bf16_split, got 2.0",
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_wrong_tensors_are_named(refusal):
    message = f"^PagedLatentCache.wrap_split: {re.escape(refusal.message)}"
    with pytest.raises(refusal.error, match=message):
        refusal.call()


def test_tensors_side_by_side_do_not_overlap():
    assert wrap(*shifted(384)).format == "bf16_split"


def test_wrap_takes_no_split_format():
    with pytest.raises(ValueError, match="format must name rows in one tensor"):
        PagedLatentCache.wrap(columns(40), ROW, format="bf16_split")


@pytest.mark.parametrize("name", ["payload", "beside"])
def test_expanded_columns_are_not_written(name):
    ckv, kpe = halves()
    if name == "payload":
        ckv = ckv[:1].expand(4, 3, 32)
    else:
        kpe = kpe[:1].expand(4, 3, 8)
    layer = PagedLatentCache.wrap_split(ckv, kpe).layer(0)
    what = "payload" if name == "payload" else "rope columns"
    with pytest.raises(ValueError, match=f"the {what} of the layer must be writable"):
        layer.write(torch.tensor([0]), torch.zeros(1, 40))
