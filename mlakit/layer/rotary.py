"""The RoPE table of a model, one for all its layers and once per device, and the rotation by it."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.dispatch.knobs import Backend
from mlakit.model.geometry import MLAGeometry, Rope, RopeParameters, RowShape
from mlakit.model.rope import check_rope, rope_table
from mlakit.ops import norm_rope_quant_append


class _Nowhere(NamedTuple):
    """The cache argument of an append that rotates queries and stores nothing."""

    cache: PagedLatentCache
    row: Tensor  # [1, 1 + D_R]
    slot: Tensor  # [1], -1


def _nowhere(width: int, device: torch.device) -> _Nowhere:
    with torch.inference_mode(False):
        return _Nowhere(
            PagedLatentCache.allocate(
                RowShape(1, width), "bf16", num_pages=1, page_size=1, device=device
            ),
            torch.zeros(1, 1 + width, dtype=torch.float32, device=device),
            torch.full((1,), -1, dtype=torch.int32, device=device),
        )


class RopeTable:
    """The cosines and sines of a model, float32 [positions, D_R], on every device that used them.

    Layers with the same angles share one table: 42 MB for 163 840 positions. It keeps float32 when
    a layer changes its dtype.
    """

    def __init__(self, geometry: MLAGeometry, positions: int) -> None:
        check_rope("MLAAttention", geometry)  # here: the table itself is computed at its first use
        self.geometry, self.positions = geometry, positions
        self._by_device: dict[torch.device, Tensor] = {}
        self._inverse: dict[torch.device, Tensor] = {}
        self._nowhere: dict[torch.device, _Nowhere] = {}

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

    def inverse_on(self, device: torch.device) -> Tensor:
        """The table of the opposite angles on `device`, computed there at its first use."""
        table = self._inverse.get(device)
        if table is None:
            with torch.inference_mode(False), torch.no_grad():
                sign = torch.tensor([1.0, -1.0], dtype=torch.float32, device=device)
                signs = sign.repeat(self.geometry.qk_rope_head_dim // 2)
                table = self._inverse[device] = self.on(device) * signs
        return table

    def rotate(
        self,
        x: Tensor,
        positions: Tensor,
        rope: Rope,
        *,
        is_inverse: bool = False,
        backend: Backend = "auto",
    ) -> None:
        """Rotate the first D_R columns of x [tokens, heads, D] in place, in one kernel.

        positions   [tokens] int32 or int64
        is_inverse  by the opposite angles
        """
        width = self.geometry.qk_rope_head_dim
        if width == 0:
            return
        nowhere = self._nowhere.get(x.device)
        if nowhere is None:
            nowhere = self._nowhere[x.device] = _nowhere(width, x.device)
        columns = x[..., :width]
        norm_rope_quant_append(
            columns,
            nowhere.row.expand(len(x), -1),
            self.inverse_on(x.device) if is_inverse else self.on(x.device),
            None,
            nowhere.cache,
            slots=nowhere.slot.expand(len(x)),
            positions=positions,
            epsilon=0.0,
            rope=rope,
            q_rope_out=columns,
            backend=backend,
        )

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
