"""The RoPE table of a model, one for all its layers and once per device; and its rotation."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mlakit.geometry import MLAGeometry, Rope, RopeParameters
from mlakit.rope import rope_table


class RopeTable:
    """The cosines and sines of a model, float32 [positions, D_R], on every device that used them.

    Layers with the same angles share one table: 42 MB for 163 840 positions. It keeps float32 when
    a layer changes its dtype.
    """

    def __init__(self, geometry: MLAGeometry, positions: int) -> None:
        self.geometry, self.positions = geometry, positions
        self._by_device: dict[torch.device, Tensor] = {}

    @classmethod
    def shared(cls, geometry: MLAGeometry, positions: int) -> RopeTable:
        """The table of these angles: the one in use, or a new one."""
        key = (geometry.rope_parameters, geometry.qk_rope_head_dim, positions)
        table = _SHARED.get(key)
        if table is None:
            table = _SHARED[key] = cls(geometry, positions)
        return table

    def on(self, device: torch.device) -> Tensor:
        """The table on `device`, computed there at its first use."""
        table = self._by_device.get(device)
        if table is None:
            table = self._by_device[device] = self._computed(device)
        return table

    def _computed(self, device: torch.device) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            if self.geometry.rope_parameters.rope_type == "none":  # every position has the same row
                row = rope_table(self.geometry, 1, device=device)
                return row.expand(self.positions, -1)
            return rope_table(self.geometry, self.positions, length=self.positions, device=device)

    def __deepcopy__(self, memo: dict[int, Any]) -> RopeTable:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return RopeTable.shared, (self.geometry, self.positions)


# tables in use by angles, width and positions
_SHARED: WeakValueDictionary[tuple[RopeParameters, int, int], RopeTable] = WeakValueDictionary()


def rotate_first_columns(x: Tensor, freqs: Tensor, rope: Rope) -> None:
    """Rotate the first D_R columns of x [tokens, ..., D] in place, in float32.

    freqs  [tokens, D_R] cos0, sin0, cos1, … of each token's position
    """
    width = freqs.shape[-1]
    if width == 0:
        return
    columns = x[..., :width]
    angle = freqs.unflatten(-1, (-1, 2)).reshape(len(freqs), *[1] * (x.ndim - 2), width // 2, 2)
    cos, sin = angle.unbind(-1)
    if rope == "half":
        first, second = columns.float().unflatten(-1, (2, -1)).unbind(-2)
        axis = -2
    else:
        first, second = columns.float().unflatten(-1, (-1, 2)).unbind(-1)
        axis = -1
    rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=axis)
    columns.copy_(rotated.flatten(-2))
