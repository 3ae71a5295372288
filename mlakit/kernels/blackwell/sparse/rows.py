"""The rows of a block of list entries, as TMA gathers find them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlakit.kernels.blackwell.device.gathers import Rows
from mlakit.kernels.hopper.sparse.lists import split_slots


@gluon.jit
def _descriptor_rows(rows, slot):
    """Rows of the cache's descriptor; −1, which is read as zeros, of invalid slots."""
    if rows.PAGE == 0:
        return slot
    else:
        page, in_page = split_slots(rows, slot)
        row = page * (rows.page_chunks // rows.row_chunks) + in_page
        return gl.where(slot >= 0, row, -1).to(gl.int32)


@gluon.jit
def listed_rows(caches, work, blocks, block, slot):
    """The rows of a block of 64 slots; `caches` are the descriptors of both caches."""
    is_extra = block >= blocks.main_blocks
    row = _descriptor_rows(work.main, slot)
    if work.HAS_EXTRA:
        row = gl.where(is_extra, _descriptor_rows(work.extra, slot), row)
    return Rows(caches[0], caches[1], is_extra, row)
