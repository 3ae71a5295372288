"""FlashMLA's cache tensors as pools; the format follows from the widths of q and of a row."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.cache.layouts import BYTE_TYPES
from mlakit.dispatch.checks import E4M3, FLOATS, Dims
from mlakit.formats import FLOAT_FORMATS, Format, row_codec
from mlakit.model.geometry import RowShape

FOOTER_ROPE = 64  # rope columns of the rows with scales at the end of a page


def row_format(
    dims: Dims, arg: str, blocks: Tensor, q: Tensor, d_v: int
) -> tuple[Format, RowShape]:
    """The format and the columns of cache rows [..., width] for queries [..., d]."""
    d, width = q.shape[-1], blocks.shape[-1]
    dims.dtype(arg, blocks, *FLOATS, *BYTE_TYPES)
    dims.rows_contiguous(arg, blocks)
    if blocks.dtype in FLOATS:
        if q.dtype != E4M3:
            dims.dtype(arg, blocks, q.dtype)
        dims.require(width == d, f"{arg}.shape[{blocks.ndim - 1}]", f"equal d of q, {d}", width)
        return FLOAT_FORMATS[blocks.dtype], _uniform_row(d, d_v)
    formats = _byte_formats(d, d_v)
    if width not in formats:
        known = " or ".join(f"{size} ({name})" for size, (name, _) in formats.items())
        dims.fail(arg, f"have rows of {known} bytes for d = {d} and {d_v} value columns", width)
    return formats[width]


def wrap_cache(
    dims: Dims,
    arg: str,
    blocks: Tensor,  # [num_blocks, page_block_size, width]
    format: Format,
    row: RowShape,
    tensor_scale: float | Tensor = 1.0,
) -> PagedLatentCache:
    """The pool in the memory of `blocks`."""
    page_size, width = blocks.shape[1:]
    dims.require(page_size >= 1, f"{arg}.shape[1]", "be at least 1", page_size)
    if format == "fp8_block64":
        dims.require(
            page_size == 1 or blocks.stride(1) == width,
            arg,
            f"have contiguous pages, row stride {width}",
            f"row stride {blocks.stride(1)}",
        )
    return PagedLatentCache.wrap(blocks, row, format=format, tensor_scale=tensor_scale)


def _uniform_row(d: int, d_v: int) -> RowShape:
    """A row in which all columns have the same dtype: rope columns are not special."""
    return RowShape(d_v, d - d_v) if (d - d_v) % 2 == 0 else RowShape(d, 0, d_v)


@lru_cache(maxsize=64)
def _byte_formats(d: int, d_v: int) -> dict[int, tuple[Format, RowShape]]:
    """Formats by bytes per row: 576 and 656 for d = 576; 512, 528 and 584 for d = 512."""
    formats: dict[int, tuple[Format, RowShape]] = {d: ("fp8", _uniform_row(d, d_v))}
    candidates: list[tuple[Format, int, int]] = [("fp8_block128", d_v, d - d_v)]
    if d == d_v:
        candidates.append(("fp8_block64", d - FOOTER_ROPE, FOOTER_ROPE))
    for name, latent, rope in candidates:
        if latent < 1 or rope % 2:
            continue
        row = RowShape(latent, rope, d_v)
        try:
            size = row_codec(name, row).bytes_per_token
        except ValueError:  # the format does not support this row shape
            continue
        formats.setdefault(size, (name, row))
    return formats
