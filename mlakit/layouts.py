"""How cache tensors lie in memory: an engine's tensor seen as a pool, and pools of our own.

Every layout is seen without a copy as payload [layers, pages, page_size, payload_elements] and,
where the format has them, scales [layers, pages, page_size, scale_elements].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlakit.checks import Dims
from mlakit.formats import PageFooterCodec, RowCodec, row_codec
from mlakit.geometry import RowShape

_HALF_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
BYTE_TYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(tensor: Tensor) -> Tensor:
    """e4m3 as bytes: on CUDA torch indexes those in every version."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def as_integers(tensor: Tensor) -> Tensor:
    """Integers of the same width: where a GPU moves floats, the bits of a NaN may change."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def refuse_scales(dims: Dims, codec: RowCodec, scales: Tensor | None) -> None:
    dims.require(
        scales is None,
        "scales",
        f"be None for format {codec.name}, which keeps none in a tensor of their own",
        "a tensor",
    )


def check_rows(dims: Dims, blocks: Tensor, nominal: Tensor, codec: RowCodec) -> None:
    """Said of `blocks` as the caller knows them, not of the four axes made of them."""
    width = _row_elements(codec)
    dims.require(
        blocks.shape[-1] == width,
        "blocks",
        f"have rows of {width} (format {codec.name} of {codec.row})",
        f"shape {tuple(blocks.shape)}",
    )
    dims.rows_contiguous("blocks", blocks)
    dims.require(nominal.shape[2] >= 1, "blocks", "have a page size of at least 1", 0)


def infer_format(dims: Dims, blocks: Tensor, row: RowShape) -> str:
    width = blocks.shape[-1] if blocks.ndim else 0
    if blocks.dtype in _HALF_FORMATS:
        return _HALF_FORMATS[blocks.dtype]
    dims.dtype("blocks", blocks, *_HALF_FORMATS, *BYTE_TYPES)
    candidates: dict[int, str] = {}
    for name in ("fp8", "fp8_token", "fp8_block128", "fp8_block64"):
        if (codec := _codec_or_none(name, row)) is not None:
            candidates.setdefault(_row_elements(codec), name)
    if width not in candidates:
        known = " or ".join(f"{size} ({name})" for size, name in candidates.items())
        dims.fail("blocks", f"have rows of {known} bytes for {row}", width)
    return candidates[width]


def _codec_or_none(name: str, row: RowShape) -> RowCodec | None:
    try:
        return row_codec(name, row)
    except ValueError:  # a row this format cannot hold
        return None


def _row_elements(codec: RowCodec) -> int:
    """The last axis of a foreign tensor; a footer counts as part of its rows."""
    if isinstance(codec, PageFooterCodec):
        return codec.bytes_per_token
    return codec.payload_elements


def retyped(dims: Dims, blocks: Tensor, codec: RowCodec) -> Tensor:
    """Byte rows come as uint8, int8 or e4m3; the element size is the same, so a view does."""
    if blocks.dtype in BYTE_TYPES and codec.payload_dtype in BYTE_TYPES:
        return blocks.view(codec.payload_dtype)
    dims.dtype("blocks", blocks, codec.payload_dtype)
    return blocks


def four_axes(dims: Dims, arg: str, blocks: Tensor) -> Tensor:
    """[layers, pages, page_size, row] of any of the shapes `wrap` takes."""
    if blocks.ndim == 3:
        return blocks.unsqueeze(0)
    if blocks.ndim == 4:
        dims.require(blocks.shape[2] == 1, f"{arg}.shape[2]", "be one KV head", blocks.shape[2])
        return blocks.squeeze(2).unsqueeze(0)
    dims.require(
        blocks.ndim == 6, arg, "have 3, 4 or 6 axes (see PagedLatentCache.wrap)", blocks.ndim
    )
    for axis in (1, 4):
        dims.require(blocks.shape[axis] == 1, f"{arg}.shape[{axis}]", "be 1", blocks.shape[axis])
    return blocks[:, 0, :, :, 0].transpose(0, 1)


def footer_views(storage: Tensor, codec: RowCodec, page_size: int) -> tuple[Tensor, Tensor]:
    """Rows and scales of pages [layers, pages, page_bytes]: all rows first, then all scales."""
    layers, pages, _ = storage.shape
    by_page = storage.stride()[:2]
    start = storage.storage_offset()
    row_bytes, scale_bytes = codec.payload_elements, codec.scale_elements
    payload = storage.as_strided(
        (layers, pages, page_size, row_bytes), (*by_page, row_bytes, 1), start
    )
    scales = storage.as_strided(
        (layers, pages, page_size, scale_bytes),
        (*by_page, scale_bytes, 1),
        start + page_size * row_bytes,
    )
    return payload, scales


def wrap_footer_pages(dims: Dims, nominal: Tensor, codec: RowCodec) -> tuple[Tensor, Tensor]:
    """A page of [page_size, 584] is one run of bytes; its nominal rows are not where tokens lie."""
    layers, pages, page_size, width = nominal.shape
    dims.require(
        page_size == 1 or nominal.stride(2) == width,
        "blocks",
        f"have contiguous pages, a row every {width} bytes",
        f"one every {nominal.stride(2)}",
    )
    run = nominal.as_strided(
        (layers, pages, page_size * width), (*nominal.stride()[:2], 1), nominal.storage_offset()
    )
    return footer_views(run, codec, page_size)


def wrap_index_key_pages(dims: Dims, blocks: Tensor) -> tuple[int, Tensor, Tensor]:
    """(D, payload, scales) of pages that hold D e4m3 of every row, then a float32 for each."""
    dims.dtype("blocks", dims.tensor("blocks", blocks), *BYTE_TYPES)
    nominal = four_axes(dims, "blocks", blocks.view(torch.uint8))
    layers, pages, page_size, width = nominal.shape
    dims.require(
        width > 4 and width % 4 == 0, "blocks", "have rows of D + 4 bytes, D % 4 == 0", width
    )
    dims.require(
        nominal.stride(3) == 1 and (page_size == 1 or nominal.stride(2) == width),
        "blocks",
        "have contiguous pages",
        f"strides {blocks.stride()}",
    )
    start, by_page = nominal.storage_offset(), nominal.stride()[:2]
    dims.require(
        start % 4 == 0 and all(stride % 4 == 0 for stride in by_page),
        "blocks",
        "have pages aligned to 4 bytes",
        f"strides {blocks.stride()} at offset {start}",
    )
    d = width - 4
    payload = nominal.as_strided((layers, pages, page_size, d), (*by_page, d, 1), start)
    run = nominal.as_strided((layers, pages, page_size * width), (*by_page, 1), start)
    scales = run.view(torch.float32)[..., page_size * d // 4 :].unsqueeze(-1)
    return d, payload, scales


def new_tensors(
    codec: RowCodec,
    rows: Sequence[int],
    *,
    scale_rows: Sequence[int] | None = None,
    device: torch.device | str,
    make: Callable[..., Tensor] = torch.zeros,
) -> tuple[Tensor, Tensor | None]:
    """Packed payload and scales of a new pool: the layout that every kernel takes.

    rows        layers, pages, page_size
    scale_rows  the same of the scales, where a pool of them has its own pages
    """
    if isinstance(codec, PageFooterCodec):
        layers, pages, page_size = rows
        # zeros whatever `make` is: the padding behind a footer belongs to no row
        storage = torch.zeros(
            layers, pages, codec.page_bytes(page_size), dtype=torch.uint8, device=device
        )
        return footer_views(storage, codec, page_size)
    payload = make(*rows, codec.payload_elements, dtype=codec.payload_dtype, device=device)
    if codec.scale_dtype is None:
        return payload, None
    sides = (*(scale_rows or rows), codec.scale_elements)
    return payload, make(*sides, dtype=codec.scale_dtype, device=device)
