"""Memory layouts of cache tensors: those of other engines, and of new pools.

Every layout is viewed without a copy as payload [layers, pages, page_size, payload_elements] and,
if the format has them, scales [layers, pages, page_size, beside_elements].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlakit.dispatch.checks import Dims
from mlakit.formats import FLOAT_FORMATS, FORMATS, Format, PageFooterCodec, RowCodec, row_codec
from mlakit.model.geometry import RowShape

FP8_FORMATS = tuple(name for name in FORMATS if name not in FLOAT_FORMATS.values())
BYTE_TYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(tensor: Tensor) -> Tensor:
    """Return e4m3 as bytes: not every torch version indexes e4m3 on CUDA."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def as_integers(tensor: Tensor) -> Tensor:
    """Return integers of the same width: copying floats on a GPU may change the bits of a NaN."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def refuse_scales(dims: Dims, codec: RowCodec, scales: Tensor | None) -> None:
    dims.require(
        scales is None,
        "scales",
        f"be None for format {codec.name}, which has no separate scales tensor",
        "a tensor",
    )


def check_rows(dims: Dims, blocks: Tensor, nominal: Tensor, codec: RowCodec) -> None:
    """Check the rows of `blocks`; errors name its shape, not the four axes of `nominal`."""
    width = _row_elements(codec)
    dims.require(
        blocks.shape[-1] == width,
        "blocks",
        f"have rows of {width} (format {codec.name} of {codec.row})",
        f"shape {tuple(blocks.shape)}",
    )
    dims.rows_contiguous("blocks", blocks)
    dims.require(nominal.shape[2] >= 1, "blocks", "have a page size of at least 1", 0)


def infer_format(dims: Dims, blocks: Tensor, row: RowShape) -> Format:
    width = blocks.shape[-1] if blocks.ndim else 0
    if blocks.dtype in FLOAT_FORMATS:
        return FLOAT_FORMATS[blocks.dtype]
    dims.dtype("blocks", blocks, *FLOAT_FORMATS, *BYTE_TYPES)
    candidates: dict[int, Format] = {}
    for name in FP8_FORMATS:
        if (codec := _codec_or_none(name, row)) is not None:
            candidates.setdefault(_row_elements(codec), name)
    if width not in candidates:
        known = " or ".join(f"{size} ({name})" for size, name in candidates.items())
        dims.fail("blocks", f"have rows of {known} bytes for {row}", width)
    return candidates[width]


def _codec_or_none(name: Format, row: RowShape) -> RowCodec | None:
    try:
        return row_codec(name, row)
    except ValueError:  # the format does not support this row shape
        return None


def _row_elements(codec: RowCodec) -> int:
    """The last axis of an engine's tensor, which counts the footer as part of the rows."""
    if isinstance(codec, PageFooterCodec):
        return codec.bytes_per_token
    return codec.payload_elements


def view_as_payload(dims: Dims, blocks: Tensor, codec: RowCodec) -> Tensor:
    """`blocks` in the dtype of the format; byte rows may be uint8, int8 or e4m3."""
    if blocks.dtype in BYTE_TYPES and codec.payload_dtype in BYTE_TYPES:
        return blocks.view(codec.payload_dtype)
    dims.dtype("blocks", blocks, codec.payload_dtype)
    return blocks


def four_axes(dims: Dims, arg: str, blocks: Tensor) -> Tensor:
    """Return any of the shapes that `wrap` takes as [layers, pages, page_size, row]."""
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
    """Rows and scales of pages [layers, pages, page_bytes]: first all rows, then all scales."""
    layers, pages, _ = storage.shape
    page_strides = storage.stride()[:2]
    start = storage.storage_offset()
    row_bytes, scale_bytes = codec.payload_elements, codec.beside_elements
    payload = storage.as_strided(
        (layers, pages, page_size, row_bytes), (*page_strides, row_bytes, 1), start
    )
    scales = storage.as_strided(
        (layers, pages, page_size, scale_bytes),
        (*page_strides, scale_bytes, 1),
        start + page_size * row_bytes,
    )
    return payload, scales


def wrap_footer_pages(dims: Dims, nominal: Tensor, codec: RowCodec) -> tuple[Tensor, Tensor]:
    """Rows and scales of pages whose nominal shape is [page_size, 584].

    The bytes of a page are first all rows, then all scales: a nominal row is not a token's row.
    """
    layers, pages, page_size, width = nominal.shape
    dims.require(
        page_size == 1 or nominal.stride(2) == width,
        "blocks",
        f"have contiguous pages, row stride {width}",
        f"row stride {nominal.stride(2)}",
    )
    page_bytes = nominal.as_strided(
        (layers, pages, page_size * width), (*nominal.stride()[:2], 1), nominal.storage_offset()
    )
    return footer_views(page_bytes, codec, page_size)


def wrap_index_key_pages(dims: Dims, blocks: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return (D, payload, scales) of pages with D e4m3 per row, then one float32 scale per row."""
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
    start, page_strides = nominal.storage_offset(), nominal.stride()[:2]
    dims.require(
        start % 4 == 0 and all(stride % 4 == 0 for stride in page_strides),
        "blocks",
        "have pages aligned to 4 bytes",
        f"strides {blocks.stride()} at offset {start}",
    )
    d = width - 4
    payload = nominal.as_strided((layers, pages, page_size, d), (*page_strides, d, 1), start)
    page_bytes = nominal.as_strided((layers, pages, page_size * width), (*page_strides, 1), start)
    scales = page_bytes.view(torch.float32)[..., page_size * d // 4 :].unsqueeze(-1)
    return d, payload, scales


def new_tensors(
    codec: RowCodec,
    rows: Sequence[int],
    *,
    beside_rows: Sequence[int] | None = None,
    device: torch.device | str,
    make: Callable[..., Tensor] = torch.zeros,
) -> tuple[Tensor, Tensor | None]:
    """Contiguous payload of a new pool and what is beside it: the layout that every kernel takes.

    rows         (layers, pages, page_size)
    beside_rows  (layers, pages, page_size) of the scales, if they have their own pages
    """
    if isinstance(codec, PageFooterCodec):
        layers, pages, page_size = rows
        # always zeros: no copy writes the padding after a footer
        storage = torch.zeros(
            layers, pages, codec.page_bytes(page_size), dtype=torch.uint8, device=device
        )
        return footer_views(storage, codec, page_size)
    payload = make(*rows, codec.payload_elements, dtype=codec.payload_dtype, device=device)
    if codec.beside_dtype is None:
        return payload, None
    shape = (*(beside_rows or rows), codec.beside_elements)
    return payload, make(*shape, dtype=codec.beside_dtype, device=device)
