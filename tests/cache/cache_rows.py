"""Rows for tests of the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.model.geometry import RowShape

V3 = RowShape(512, 64)
V4 = RowShape(448, 64, 512)


def random_rows(count: int, row: RowShape, generator: torch.Generator) -> Tensor:
    return torch.randn(count, row.width, generator=generator)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
