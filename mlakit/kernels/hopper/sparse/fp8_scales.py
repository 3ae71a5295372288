"""Scales of FP8 caches, as `fp8_rows.RowScales` takes them; no device code."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.cache import CacheLayer


class ScaleArguments(NamedTuple):
    """Scales that are not inside the rows of a cache, with the fields of `fp8_rows.RowScales`."""

    first: Tensor | None
    stride_page: int
    stride_row: int
    tensor_scale: float


def scale_arguments(*layers: CacheLayer) -> tuple[ScaleArguments, ...]:
    return tuple(_scales(each) for each in layers)


def _scales(layer: CacheLayer) -> ScaleArguments:
    scales, tensor_scale = layer.scales, layer.tensor_scale
    if scales is not None:
        scales = words_of(scales) if scales.element_size() == 1 else scales
        page_stride, row_stride, _ = scales.stride()
        # in pages of one row, all rows have the same stride
        return ScaleArguments(
            scales, page_stride, page_stride if layer.page_size == 1 else row_stride, 1.0
        )
    if isinstance(tensor_scale, Tensor):
        return ScaleArguments(tensor_scale.to(layer.payload.device), 0, 0, 1.0)
    return ScaleArguments(None, 0, 0, float(tensor_scale))


def words_of(rows: Tensor) -> Tensor:
    """Bytes [n, m, columns] as int32; the stride of an axis of size 1 may be anything."""
    columns = rows.shape[-1]
    strides = [
        stride if size > 1 else columns
        for stride, size in zip(rows.stride(), rows.shape, strict=True)
    ]
    return rows.view(torch.uint8).as_strided(rows.shape, (*strides[:-1], 1)).view(torch.int32)
