"""Shapes and layouts of tensors, and values that the launch gives.

In the combination of a reduction a value has the elements that are combined at once in its leading
dimensions, so that there the shapes of the IR are those of the last dimensions.
"""

from __future__ import annotations

import numpy as np

from mlakit.tools.emulator import dtypes
from mlakit.tools.emulator.clusters import stays
from mlakit.tools.emulator.codegen.emitter import Emitter, emits, numpy_name
from mlakit.tools.emulator.ir import Op, Unsupported


@emits("tt.splat", "tt.unsplat", "tt.reshape", "tt.expand_dims", "tt.trans", "tt.broadcast")
def reshape(emitter: Emitter, op: Op) -> str:
    """The same elements, or copies of them, in another shape."""
    value = emitter.operands(op)[0]
    if emitter.scalars_are_arrays:
        return _reshape_last(emitter, op, value)
    target = emitter.type(op.result_type)
    if op.name == "tt.splat":
        return f"np.full({target.shape}, {value}, {numpy_name(target.kind)})"
    if op.name == "tt.unsplat":
        return f"scalar({value}.reshape(-1)[0], {target.kind!r})"
    if op.name == "tt.broadcast":
        return f"np.broadcast_to({value}, {target.shape})"
    if op.name == "tt.expand_dims":
        return f"np.expand_dims({value}, {op.int_attr('axis')})"
    if op.name == "tt.trans":
        return f"np.transpose({value}, {op.array_attr('order')})"
    return f"np.reshape({value}, {target.shape})"


def _reshape_last(emitter: Emitter, op: Op, value: str) -> str:
    source, target = emitter.type(op.source_type), emitter.type(op.result_type)
    rank = len(source.shape)
    if op.name == "tt.trans":
        order = [each - rank for each in op.array_attr("order")]
        return f"transpose_last({value}, {order})"
    shape = () if op.name == "tt.unsplat" else target.shape
    is_broadcast = op.name in ("tt.splat", "tt.broadcast")
    return f"reshape_last({value}, {rank}, {shape}, {is_broadcast})"


@emits("tt.join")
def join(emitter: Emitter, op: Op) -> str:
    """Two tensors as the last dimension of one."""
    a, b = emitter.operands(op)
    return f"np.stack([{a}, {b}], -1)"


@emits("tt.split")
def split(emitter: Emitter, op: Op) -> None:
    """The two tensors that a join has made one."""
    source = emitter.operands(op)[0]
    first, second = emitter.results(op)
    emitter.write(f"{first} = {source}[..., 0]")
    emitter.write(f"{second} = {source}[..., 1]")


@emits("tt.cat")
def concatenate(emitter: Emitter, op: Op) -> str:
    """Two tensors, one after the other."""
    a, b = emitter.operands(op)
    return f"np.concatenate([{a}, {b}])"


@emits("tt.make_range")
def make_range(emitter: Emitter, op: Op) -> str:
    """Consecutive integers."""
    start, end = op.int_attr("start"), op.int_attr("end")
    return emitter.constant(np.arange(start, end, dtype=np.int32), f"range {start} {end}")


@emits("ttg.convert_layout")
def convert_layout(emitter: Emitter, op: Op) -> str:
    """The same tensor in other threads."""
    types = emitter.type(op.source_type), emitter.type(op.result_type)
    if not stays(*types, emitter.module.num_ctas):
        raise Unsupported("a layout that needs elements of another CTA")
    source, target = emitter.type_constant(op.source_type), emitter.type_constant(op.result_type)
    return f"rt.convert({emitter.operands(op)[0]}, {source}, {target}, p.num_warps)"


@emits("tt.ptr_to_int", "tt.int_to_ptr", "gluon.set_auto_layout")
def unchanged(emitter: Emitter, op: Op) -> str:
    """A pointer is its address, and layouts are in the types."""
    return emitter.operands(op)[0]


@emits("tt.addptr")
def add_to_pointer(emitter: Emitter, op: Op) -> str:
    """An offset in elements, added to addresses in bytes."""
    type = emitter.type(op.operand_types()[0])
    pointer, offset = emitter.operands(op)
    size = dtypes.element_size(type.pointee)
    if type.is_tensor:
        return f"{pointer} + {offset}.astype(np.int64) * {size}"
    return f"{pointer} + {offset} * {size}"


@emits("tt.get_program_id", "tt.get_num_programs")
def program(emitter: Emitter, op: Op) -> str:
    """The place of the CTA in the grid, or the size of the grid."""
    axis = "xyz".index(op.text.strip()[0])
    return f"rt.machine.{'program' if op.name == 'tt.get_program_id' else 'grid'}[{axis}]"
