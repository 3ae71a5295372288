"""Repairs of Triton's interpreter (Triton 3.6 to 3.9, any numpy).

numpy has no bfloat16 and no 8-bit floats, so the interpreter keeps their bit patterns in integers.
It gives wrong numbers:

    a dot of bfloat16 multiplies the bit patterns            -> operands are converted first
    −x, x + y, x < y, ... of bfloat16 do the same            -> in float32, the result is rounded
    casts to bfloat16 truncate, those to e4m3 round wrongly  -> nearest even, e4m3 saturates
    a loop bound loaded from memory fails (numpy ≥ 2.4)      -> its one element is read

and it is slow:

    each call of a device function patches tl again          -> one patch per launch
    integer sums are checked for overflow, without effect    -> no checks
    types and shapes are built anew for every tensor         -> kept, by element type and shape

The first two take about half the time of a kernel, the third a fifth of the rest. `repair` runs
before the first kernel wherever kernels are interpreted; a second call does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH_TYPES = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


@lru_cache(maxsize=1)
def repair() -> None:
    _repair_dot()
    _repair_casts()
    _repair_arithmetic()
    _repair_loop_bounds()
    _patch_once_per_launch()
    _drop_overflow_checks()
    _keep_types()


def _repair_dot() -> None:
    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def repaired(self: Any, a: Any, b: Any, d: Any, *args: Any, **kwargs: Any) -> Any:
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return create_dot(self, a, b, d, *args, **kwargs)
        product = np.matmul(_as_float32(a), _as_float32(b)) + d.data
        return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    builder.create_dot = repaired


def _as_float32(operand: Any) -> np.ndarray:
    if operand.dtype.scalar == tl.bfloat16:
        return (operand.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return operand.data.astype(np.float32)


def _repair_casts() -> None:
    convert = interpreter._convert_float

    def repaired(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        known = source in TORCH_TYPES and target in TORCH_TYPES
        if not known or str(rounding).endswith("RTZ"):
            return convert(x, source, target, rounding)
        values = torch.empty(0, dtype=TORCH_TYPES[source], device="cpu")
        if x.size:
            values = torch.frombuffer(bytearray(x.tobytes()), dtype=TORCH_TYPES[source])
        values = values.to(torch.float64 if source == tl.float64 else torch.float32)
        if target.primitive_bitwidth == 8:
            largest = torch.finfo(TORCH_TYPES[target]).max
            values = values.clamp(-largest, largest)  # keeps NaN
        bits = values.to(TORCH_TYPES[target]).view(torch.uint8).numpy()
        return bits.view(f"uint{target.primitive_bitwidth}").reshape(x.shape)

    interpreter._convert_float = repaired


def _repair_arithmetic() -> None:
    builder = interpreter.InterpreterBuilder

    def of_floats(method: Callable[..., Any]) -> Callable[..., Any]:
        def repaired(self: Any, *operands_and_op: Any) -> Any:
            *operands, op = operands_and_op
            dtype = operands[0].dtype.scalar
            if dtype != tl.bfloat16:
                return method(self, *operands, op)
            result = op(*map(_as_float32, operands))
            if result.dtype != np.bool_:
                result = interpreter._convert_float(result, tl.float32, dtype, None)
            return interpreter.TensorHandle(result, dtype)

        return repaired

    builder.unary_op = of_floats(builder.unary_op)
    builder.binary_op = of_floats(builder.binary_op)


def _repair_loop_bounds() -> None:
    patch = interpreter._patch_lang_tensor

    def first_element(self: Any) -> int:
        return int(np.asarray(self.handle.data).reshape(-1)[0])

    def repaired(tensor: Any, *scope: Any) -> Any:
        result = patch(tensor, *scope)
        if scope and hasattr(scope[0], "set_attr"):
            scope[0].set_attr(tensor, "__index__", first_element)
        else:
            tensor.__index__ = first_element
        return result

    interpreter._patch_lang_tensor = repaired


def _patch_once_per_launch() -> None:
    patch = interpreter._patch_lang
    patched: set[Any] = set()  # modules, between the first patch of a launch and its end

    def repaired(fn: Any) -> Any:
        visible = {each for each in fn.__globals__.values() if each is tl or each is tl.core}
        if visible and visible <= patched:
            return interpreter._LangPatchScope()
        is_launch = not patched
        scope = patch(fn)
        patched.update(visible)
        if is_launch:
            restore = scope.restore

            def restore_and_forget() -> None:
                patched.clear()
                restore()

            scope.restore = restore_and_forget
        return scope

    interpreter._patch_lang = repaired


def _drop_overflow_checks() -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # `device_assert` then ignores what the checks find
        builder.options = replace(builder.options, sanitize_overflow=False)


def _keep_types() -> None:
    interpreter._get_np_dtype = _kept_np_dtypes(interpreter._get_np_dtype)
    _keep_block_types()
    _keep_shapes()


def _kept_np_dtypes(get_np_dtype: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    by_name: dict[str, np.dtype] = {}

    def kept(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        found = by_name.get(name)
        if found is None:
            found = by_name[name] = get_np_dtype(dtype)
        return found

    return kept


def _keep_block_types() -> None:
    """A block type is its attributes, and none of them changes."""
    block_type = tl.core.block_type
    init = block_type.__init__
    attributes: dict[Any, dict[str, Any]] = {}

    def kept(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if not all(type(size) is int for size in sizes):
            init(self, element_ty, shape)
            return
        key = (element_ty.name, sizes)
        if key not in attributes:
            init(self, element_ty, shape)
            attributes[key] = dict(vars(self))
        # pointers of one name may differ
        vars(self).update(attributes[key], element_ty=element_ty)

    block_type.__init__ = kept


def _keep_shapes() -> None:
    """A tensor has its shape as a tuple of constants, which no one changes."""
    tensor = tl.core.tensor
    init = tensor.__init__
    by_shape: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def kept(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        found = by_shape.get(key)
        if found is None:
            init(self, handle, type)
            by_shape[key] = self.numel, self.shape
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = found

    tensor.__init__ = kept
