"""Objects that hold the tensors of a cache: how they are copied, and the views kept with them.

A view shares the memory of a tensor. One that is kept must not be used once the tensor has other
memory, must not keep memory that the tensor no longer has, and belongs to no copy of its owner.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from mlakit.formats import RowCodec
from mlakit.layouts import bits
from mlakit.reprs import shown

PLAIN = (Tensor, Parameter)  # other types may have no memory of their own
LayerT = TypeVar("LayerT")


class View(NamedTuple):
    """Where a tensor lies in the storage of another."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int

    def into(self, tensor: Tensor) -> Tensor:
        """The tensor that lies there in the storage of `tensor`."""
        empty = torch.empty(0, dtype=self.dtype, device=tensor.device)
        storage = tensor.untyped_storage()
        return empty.set_(storage, self.storage_offset, self.shape, self.stride)


def view_within(part: Tensor, whole: Tensor) -> View | None:
    """Where `part` lies in the storage of `whole`; None where it has a storage of its own."""
    if part.untyped_storage()._cdata != whole.untyped_storage()._cdata:
        return None
    return View(part.dtype, tuple(part.shape), part.stride(), int(part.storage_offset()))


class TensorHolder:
    """How a pool and a layer are copied and pickled: as their fields, without what is kept beside
    them. A kept view would be of the original's memory, or of a second copy of it."""

    codec: RowCodec
    payload: Tensor
    scales: Tensor | None
    tensor_scale: float | Tensor

    def __copy__(self: HolderT) -> HolderT:
        return replace(self)  # type: ignore[type-var]  # they are dataclasses

    def __getstate__(self) -> dict[str, object]:
        # scales in the payload's storage as a place there: else pickle would part the two
        within = None if self.scales is None else view_within(self.scales, self.payload)
        return {
            "codec": self.codec,
            "payload": bits(self.payload),  # which pickle takes, unlike e4m3
            "scales": within or self.scales,
            "tensor_scale": self.tensor_scale,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        payload, scales = state["payload"], state["scales"]
        if payload.dtype.itemsize == 1:
            payload = payload.view(state["codec"].payload_dtype)
        if isinstance(scales, View):
            scales = scales.into(payload)
        vars(self).update(state, payload=payload, scales=scales)

    def __repr__(self) -> str:
        return shown(
            self,
            format=self.codec.name,
            row=self.codec.row,
            payload=self.payload,
            scales=self.scales,
            tensor_scale=self.tensor_scale,
        )


HolderT = TypeVar("HolderT", bound=TensorHolder)


class LayerViews(Generic[LayerT]):
    """Layers of a pool that were asked for, and what tells that its memory is still the same.

    It keeps neither the pool nor its tensors: the layers are let go with the tensors they are of.
    """

    __slots__ = ("_codec", "_payload", "_scales", "_tensor_scale", "layers")

    def __init__(self, pool: TensorHolder) -> None:
        self.layers: dict[int, LayerT] = {}
        self._codec, self._tensor_scale = pool.codec, pool.tensor_scale
        self._payload = _facts(pool.payload, self.layers)
        self._scales = None if pool.scales is None else _facts(pool.scales, self.layers)

    def are_of(self, pool: TensorHolder) -> bool:
        """Are the tensors of `pool` the same objects, with the memory they had?

        Written out, because every eager call of an op waits for it.
        """
        tensor, scales = pool.payload, self._scales
        # tensors can be given other memory in place: set_, resize_, .data
        known, address, shape, stride, dtype = self._payload
        if (
            known() is not tensor
            or tensor.data_ptr() != address
            or tensor.stride() != stride
            or tensor.shape != shape
            or tensor.dtype is not dtype
            or tensor.requires_grad
            or pool.tensor_scale is not self._tensor_scale
            or pool.codec is not self._codec
        ):
            return False
        if scales is None or pool.scales is None:
            return scales is None and pool.scales is None
        tensor, (known, address, shape, stride, dtype) = pool.scales, scales
        return (
            known() is tensor
            and tensor.data_ptr() == address
            and tensor.stride() == stride
            and tensor.shape == shape
            and tensor.dtype is dtype
            and not tensor.requires_grad
        )


def _facts(
    tensor: Tensor, views: dict[int, Any]
) -> tuple[weakref.ref[Tensor], int, torch.Size, tuple[int, ...], torch.dtype]:
    """What `LayerViews` compares; `views` of the tensor are let go with it."""
    known = weakref.ref(tensor, lambda _: views.clear())
    return known, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def has_lasting_views(pool: TensorHolder) -> bool:
    """Can views of its tensors be kept? Not of those that require grad or have no memory."""
    try:
        return all(
            type(tensor) in PLAIN and not tensor.requires_grad and tensor.data_ptr() >= 0
            for tensor in (pool.payload, pool.scales)
            if tensor is not None
        )
    except RuntimeError:  # there is no address
        return False
