"""Scales of FP8 caches, as `fp8_rows.RowScales` takes them; no device code."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.cache import CacheLayer
from mlakit.kernels.hopper.sparse.arguments import RowScaleArguments


def row_scale_arguments(layer: CacheLayer) -> RowScaleArguments:
    scales, tensor_scale = layer.scales, layer.tensor_scale
    if scales is not None:
        scales = words_of(scales) if scales.element_size() == 1 else scales
        page_stride, row_stride, _ = scales.stride()
        # in pages of one row, all rows have the same stride
        row_stride = page_stride if layer.page_size == 1 else row_stride
        return RowScaleArguments(scales, page_stride, row_stride, 1.0)
    if isinstance(tensor_scale, Tensor):
        return RowScaleArguments(tensor_scale.to(layer.payload.device), 0, 0, 1.0)
    return RowScaleArguments(None, 0, 0, float(tensor_scale))


def words_of(rows: Tensor) -> Tensor:
    """Bytes [n, m, columns] as int32; the stride of an axis of size 1 may be anything."""
    columns = rows.shape[-1]
    strides = [
        stride if size > 1 else columns
        for stride, size in zip(rows.stride(), rows.shape, strict=True)
    ]
    return rows.view(torch.uint8).as_strided(rows.shape, (*strides[:-1], 1)).view(torch.int32)
