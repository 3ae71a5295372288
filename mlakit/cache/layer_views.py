"""The tensors of a pool or a layer: cached layer views, copies, pickles and reprs.

A cached view must not be used after its tensor gets other memory, must not keep freed memory alive,
and is not copied or pickled with its pool.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from mlakit.cache.layouts import bits
from mlakit.dispatch.reprs import fields_repr
from mlakit.formats import RowCodec

PLAIN = (Tensor, Parameter)  # subclasses may have no memory of their own
LayerT = TypeVar("LayerT")


class View(NamedTuple):
    """The position of a tensor in the storage of another one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int

    def into(self, tensor: Tensor) -> Tensor:
        """The tensor at this position in the storage of `tensor`."""
        empty = torch.empty(0, dtype=self.dtype, device=tensor.device)
        storage = tensor.untyped_storage()
        return empty.set_(storage, self.storage_offset, self.shape, self.stride)


def view_within(tensor: Tensor, base: Tensor) -> View | None:
    """The position of `tensor` in the storage of `base`; None if their storages differ."""
    if tensor.untyped_storage()._cdata != base.untyped_storage()._cdata:
        return None
    return View(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


class CacheTensors:
    """The fields that a pool and a layer share. Copies and pickles have these fields only: a cached
    view would point to the memory of the original."""

    codec: RowCodec
    payload: Tensor
    beside: Tensor | None
    tensor_scale: float | Tensor

    @property
    def scales(self) -> Tensor | None:
        """The scales of the rows, where the format has them in a tensor of their own."""
        return None if self.codec.is_split else self.beside

    @property
    def rope(self) -> Tensor | None:
        """The rotated columns, where the format has them in a tensor of their own."""
        return self.beside if self.codec.is_split else None

    def __copy__(self: CacheTensorsT) -> CacheTensorsT:
        return replace(self)  # type: ignore[type-var]  # subclasses are dataclasses

    def __getstate__(self) -> dict[str, object]:
        # what is in the payload's storage stays there: pickle alone would separate the two
        beside: Tensor | View | None = self.beside
        if isinstance(beside, Tensor):
            beside = view_within(beside, self.payload) or bits(beside)
        return {
            "codec": self.codec,
            "payload": bits(self.payload),  # bytes: pickle does not support e4m3
            "beside": beside,
            "tensor_scale": self.tensor_scale,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        payload, beside = state["payload"], state["beside"]
        codec: RowCodec = state["codec"]
        if payload.dtype.itemsize == 1:
            payload = payload.view(codec.payload_dtype)
        if isinstance(beside, View):
            beside = beside.into(payload)
        elif beside is not None and codec.beside_dtype is not None:
            beside = beside.view(codec.beside_dtype)
        vars(self).update(state, payload=payload, beside=beside)

    def __repr__(self) -> str:
        beside = "rope" if self.codec.is_split else "scales"
        return fields_repr(
            self,
            format=self.codec.name,
            row=self.codec.row,
            payload=self.payload,
            **{beside: self.beside},
            tensor_scale=self.tensor_scale,
        )


CacheTensorsT = TypeVar("CacheTensorsT", bound=CacheTensors)


class LayerViews(Generic[LayerT]):
    """The cached layer views of a pool, and the properties of its tensors that keep them valid.

    Holds no reference to the pool or its tensors: views are dropped with the tensors.
    """

    __slots__ = ("_beside", "_codec", "_payload", "_tensor_scale", "layers")

    def __init__(self, pool: CacheTensors) -> None:
        self.layers: dict[int, LayerT] = {}
        self._codec, self._tensor_scale = pool.codec, pool.tensor_scale
        self._payload = _identity(pool.payload, self.layers)
        self._beside = None if pool.beside is None else _identity(pool.beside, self.layers)

    def is_current(self, pool: CacheTensors) -> bool:
        """Return whether the tensors of `pool` are the same objects with the same memory.

        Written without a loop: every eager call of an op runs it.
        """
        tensor, beside = pool.payload, self._beside
        # set_, resize_ and .data replace the memory of a tensor in place
        tensor_ref, address, shape, stride, dtype = self._payload
        if (
            tensor_ref() is not tensor
            or tensor.data_ptr() != address
            or tensor.stride() != stride
            or tensor.shape != shape
            or tensor.dtype is not dtype
            or tensor.requires_grad
            or pool.tensor_scale is not self._tensor_scale
            or pool.codec is not self._codec
        ):
            return False
        if beside is None or pool.beside is None:
            return beside is None and pool.beside is None
        tensor, (tensor_ref, address, shape, stride, dtype) = pool.beside, beside
        return (
            tensor_ref() is tensor
            and tensor.data_ptr() == address
            and tensor.stride() == stride
            and tensor.shape == shape
            and tensor.dtype is dtype
            and not tensor.requires_grad
        )


def _identity(
    tensor: Tensor, views: dict[int, Any]
) -> tuple[weakref.ref[Tensor], int, torch.Size, tuple[int, ...], torch.dtype]:
    """Return what `LayerViews` compares of a tensor; `views` are dropped with the tensor."""
    tensor_ref = weakref.ref(tensor, lambda _: views.clear())
    return tensor_ref, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def can_cache_views(pool: CacheTensors) -> bool:
    """Return whether views of the pool's tensors can be cached: they need memory, and no grad."""
    try:
        return all(
            type(tensor) in PLAIN and not tensor.requires_grad and tensor.data_ptr() >= 0
            for tensor in (pool.payload, pool.beside)
            if tensor is not None
        )
    except RuntimeError:  # data_ptr of a tensor without memory
        return False
