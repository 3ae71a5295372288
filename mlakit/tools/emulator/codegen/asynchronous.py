"""Barriers, and what completes on them: TMA, cp.async and wgmma."""

from __future__ import annotations

import re
from inspect import signature

from triton.experimental.gluon.language.nvidia.hopper import tma

from mlakit.tools.emulator.codegen.emitter import Emitter, emits, optional
from mlakit.tools.emulator.ir import SSA, Op, Unsupported

# until Triton 3.8 a wait for TMA stores is always one for the end of their reads
NAMES_READS = "read_only" in signature(tma.store_wait).parameters

# ---------------------------------------------------------- mbarriers and fences


def _number_after_operand(op: Op) -> int:
    """Return the count of `%barrier, 128` and the like."""
    found = re.search(r",\s*(\d+)", op.text)
    if not found:
        raise Unsupported(f"{op.name} without a number")
    return int(found.group(1))


@emits("ttng.init_barrier")
def init_barrier(emitter: Emitter, op: Op) -> str:
    """An mbarrier with the number of arrivals of a phase."""
    return f"rt.init_barrier(p, {emitter.operands(op)[0]}, {_number_after_operand(op)})"


@emits("ttng.inval_barrier")
def invalidate_barrier(emitter: Emitter, op: Op) -> str:
    """The end of an mbarrier."""
    return f"rt.invalidate_barrier(p, {emitter.operands(op)[0]})"


@emits("ttng.arrive_barrier")
def arrive(emitter: Emitter, op: Op) -> str:
    """Arrivals on an mbarrier, under a predicate."""
    tile, *rest = emitter.operands(op)
    count, is_asked = _number_after_operand(op), optional(rest, "True")
    ranks = f"{_bits(op, 'fromCTA')}, {_bits(op, 'multicastCTA')}"
    return f"yield from rt.arrive(p, {tile}, {count}, {is_asked}, None, {ranks})"


def _bits(op: Op, name: str) -> int | None:
    """Return an attribute of an arrival that has bits of ranks, or None: it counts at its CTA."""
    return None if op.attr(name) is None else op.int_attr(name)


@emits("ttng.barrier_expect")
def expect(emitter: Emitter, op: Op) -> str:
    """One arrival that announces bytes, under a predicate."""
    tile, *rest = emitter.operands(op)
    size, is_asked = _number_after_operand(op), optional(rest, "True")
    return f"yield from rt.arrive(p, {tile}, 1, {is_asked}, {size}, {_bits(op, 'fromCTA')})"


@emits("ttng.wait_barrier")
def wait(emitter: Emitter, op: Op) -> str:
    """A wait for a phase; `deps` only keep allocations alive."""
    before = SSA.findall(re.split(r"\bdeps\b", op.text)[0])
    tile, phase, *rest = (emitter.variable(each) for each in before)
    return f"yield from rt.wait(p, {tile}, {phase}, {optional(rest, 'True')})"


@emits("ttg.barrier", "gpu.barrier")
def sync_warps(emitter: Emitter, op: Op) -> str:
    """A barrier of the warps of the partition."""
    return "rt.sync_warps(p)"


@emits("ttng.fence_async_shared")
def fence(emitter: Emitter, op: Op) -> str:
    """fence.proxy.async, of the CTA or of the cluster."""
    return f"rt.fence(p, {op.attr('bCluster', 'false') == 'true'})"


@emits("ttng.fence_mbarrier_init_release_cluster")
def fence_initialisations(emitter: Emitter, op: Op) -> str:
    """A fence that lets peers see which mbarriers are initialised."""
    return "rt.fence_initialisations(p)"


@emits("ttng.cluster_barrier")
def meet_cluster(emitter: Emitter, op: Op) -> str:
    """A barrier of the threads of all CTAs of a cluster."""
    return f"yield from rt.meet_cluster(p, {op.attr('relaxed', 'false') == 'true'})"


# ---------------------------------------------------------- TMA


def is_multicast(op: Op) -> bool:
    """Does an operation act on all CTAs that have copies of a tile?"""
    return re.search(r"[{,]\s*multicast\s*[,}]", op.text) is not None


def _tma_operands(emitter: Emitter, op: Op) -> tuple[str, list[str], list[str]]:
    """Return the descriptor, the coordinates and the operands after them."""
    found = re.match(r"\s*(%[^\s\[]+)\[([^\]]*)\]\s*(.*)$", op.text)
    if not found:
        raise Unsupported(f"operands {op.text}")
    at = [emitter.variable(each) for each in SSA.findall(found.group(2))]
    rest = [emitter.variable(each) for each in SSA.findall(found.group(3))]
    return emitter.variable(found.group(1)), at, rest


@emits("ttng.async_tma_copy_global_to_local")
def tma_load(emitter: Emitter, op: Op) -> str:
    """A TMA load of a tile, which completes on an mbarrier."""
    descriptor, at, (tile, barrier, *rest) = _tma_operands(emitter, op)
    place = f"[{', '.join(at)}]"
    operands = f"{descriptor}, {place}, {tile}, {barrier}, {optional(rest, 'True')}"
    return f"yield from rt.tma_load(p, {operands}, None, {is_multicast(op)})"


@emits("ttng.async_tma_gather")
def tma_gather(emitter: Emitter, op: Op) -> str:
    """A TMA load of rows that an operand names."""
    descriptor, (rows, column), (tile, barrier, *rest) = _tma_operands(emitter, op)
    place = f"[0, {column}]"
    operands = f"{descriptor}, {place}, {tile}, {barrier}, {optional(rest, 'True')}"
    return f"yield from rt.tma_load(p, {operands}, {rows}, {is_multicast(op)})"


@emits("ttng.async_tma_copy_local_to_global")
def tma_store(emitter: Emitter, op: Op) -> str:
    """A TMA store of a tile."""
    descriptor, at, (tile, *_) = _tma_operands(emitter, op)
    return f"yield from rt.tma_store(p, {descriptor}, [{', '.join(at)}], {tile})"


@emits("ttng.async_tma_store_wait")
def tma_store_wait(emitter: Emitter, op: Op) -> str:
    """A wait until few TMA stores of the partition are pending."""
    is_read = "read_only" in op.text or not NAMES_READS
    return f"yield from rt.store_wait(p, {op.int_attr('pendings')}, {is_read})"


# ---------------------------------------------------------- cp.async


@emits("ttg.async_copy_global_to_local")
def copy_async(emitter: Emitter, op: Op) -> None:
    """A cp.async of the elements at pointers, with a mask."""
    pointer, tile, *_ = emitter.operands(op)
    named = {
        key: emitter.variable(each)
        for key, each in re.findall(rf"(mask|other) ({SSA.pattern})", op.text)
    }
    mask, other = named.get("mask"), named.get("other")
    emitter.write(f"yield from rt.copy_async(p, {pointer}, {tile}, {mask}, {other})")
    emitter.assign_tokens(op.results)


@emits("ttng.async_copy_mbarrier_arrive")
def copy_arrive(emitter: Emitter, op: Op) -> str:
    """An arrival when all copies of each thread so far are complete."""
    increments = "noIncrement" not in op.text
    return f"yield from rt.copy_arrive(p, {emitter.operands(op)[0]}, {increments})"


@emits("ttg.async_commit_group")
def commit_group(emitter: Emitter, op: Op) -> None:
    """The end of a group of copies."""
    emitter.write("rt.commit_group(p)")
    emitter.assign_tokens(op.results)


@emits("ttg.async_wait")
def wait_groups(emitter: Emitter, op: Op) -> None:
    """A wait until few groups of copies are pending."""
    emitter.write(f"yield from rt.wait_groups(p, {op.int_attr('num')})")
    emitter.assign_tokens(op.results)


# ---------------------------------------------------------- products


@emits("ttng.warp_group_dot")
def warp_group_dot(emitter: Emitter, op: Op) -> str:
    """A wgmma; its result may be used after a wait."""
    a, b, c, *rest = emitter.operands(op)
    is_async = op.attr("isAsync", "false") == "true"
    return f"yield from rt.dot(p, {a}, {b}, {c}, {optional(rest, 'True')}, {is_async})"


@emits("ttng.warp_group_dot_wait")
def warp_group_dot_wait(emitter: Emitter, op: Op) -> None:
    """A wait until few wgmmas are pending."""
    values = ", ".join(emitter.operands(op))
    wait = f"yield from rt.dot_wait(p, [{values}], {op.int_attr('pendings')})"
    emitter.write(f"{', '.join(emitter.results(op))}, = {wait}")


@emits("tt.dot")
def dot(emitter: Emitter, op: Op) -> str:
    """A product of a @triton.jit kernel, which is synchronous."""
    a, b, c = emitter.operands(op)[:3]
    return f"{a}.astype(np.float32) @ {b}.astype(np.float32) + {c}"
