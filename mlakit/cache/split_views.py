"""Rows in two tensors, latent columns and rotated columns, checked and viewed as a pool's."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.cache.layouts import BYTE_TYPES
from mlakit.dispatch.checks import E4M3, Dims
from mlakit.formats import FLOAT_FORMATS


def split_views(dims: Dims, ckv: Tensor, kpe: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return (latent columns, rotated columns), each [pages, page_size, columns].

    Where both are columns of joined rows, or there are no rotated columns: (joined rows, None).
    """
    dtypes = (*FLOAT_FORMATS, *BYTE_TYPES)
    dims.match("ckv", ckv, "pages", "page_size", "D_C", dtypes=dtypes)
    dims.match("kpe", kpe, "pages", "page_size", "D_R", dtypes=dtypes)
    if kpe.dtype != ckv.dtype:
        want, got = (str(tensor.dtype).removeprefix("torch.") for tensor in (ckv, kpe))
        raise TypeError(f"{dims.op}: kpe must have the dtype of ckv, {want}, got {got}")
    for name, tensor in (("ckv", ckv), ("kpe", kpe)):
        dims.rows_contiguous(name, tensor)
    dims.require(ckv.shape[2] >= 1, "ckv", "have at least one column", 0)
    dims.require(kpe.shape[2] % 2 == 0, "kpe", "have an even number of columns", kpe.shape[2])
    dims.require(ckv.shape[1] >= 1, "ckv", "have a page size of at least 1", 0)
    if ckv.dtype in BYTE_TYPES:
        ckv, kpe = ckv.view(E4M3), kpe.view(E4M3)
    if kpe.shape[2] == 0:
        return ckv, None
    if torch.compiler.is_compiling() or type(ckv) is not Tensor or type(kpe) is not Tensor:
        return ckv, kpe  # tensors without an address
    apart = kpe.data_ptr() - ckv.data_ptr()
    shared = f"ckv [{_layout(ckv)}] and kpe [{_layout(kpe)}] {apart} bytes behind it"
    dims.require(not _share_memory(ckv, kpe, apart), "kpe", "share no memory with ckv", shared)
    is_joined = _have_same_steps(ckv, kpe, 2) and apart == ckv.shape[2] * ckv.element_size()
    if is_joined and ckv.untyped_storage()._cdata == kpe.untyped_storage()._cdata:
        return ckv.as_strided((*ckv.shape[:2], ckv.shape[2] + kpe.shape[2]), ckv.stride()), None
    return ckv, kpe


def _layout(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"


def _share_memory(first: Tensor, second: Tensor, apart: int) -> bool:
    """Return whether the tensors may share an element: False where they are apart as a whole, or
    where their pages, or their rows, alternate at the same steps.

    apart  bytes from the first tensor to the second
    """
    if first.numel() == 0 or second.numel() == 0:
        return False
    lower, upper = (first, second) if apart >= 0 else (second, first)
    size = first.element_size()
    for axis in range(3):
        # the parts that axes from this one on make up
        if abs(apart) < size * _span(lower, axis):
            continue
        end = abs(apart) + size * _span(upper, axis)
        if not _have_same_steps(lower, upper, axis):
            continue
        steps = sorted(zip(lower.stride()[:axis], lower.shape[:axis], strict=True))
        for step, count in steps:
            if count > 1 and step * size < end:
                break
            end += (count - 1) * step * size
        else:
            return False
    return True


def _span(tensor: Tensor, axis: int) -> int:
    """Return the elements from the first to the last along the axes from `axis` on."""
    steps = zip(tensor.stride()[axis:], tensor.shape[axis:], strict=True)
    return 1 + sum((count - 1) * step for step, count in steps)


def _have_same_steps(first: Tensor, second: Tensor, axes: int) -> bool:
    """Return whether the strides of the first `axes` axes are the same, as far as they matter."""
    return all(
        count == 1 or first.stride(axis) == second.stride(axis)
        for axis, count in enumerate(first.shape[:axes])
    )
