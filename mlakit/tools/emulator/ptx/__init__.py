"""Inline assembly: PTX on all threads of a warp partition at once.

Registers   arrays of raw bits [warps, 32 lanes, invocations]; a thread makes one invocation per
            `packed_element` elements. Predicates are arrays of bool
Control     guards and forward branches are masks of the threads that are active
Reading     `program` splits the text once per process and looks each instruction up in the table
            of `instruction`; one that is not there raises `Unsupported`, before anything runs

    program       statements, labels and branches
    threads       registers, operands and masks
    barriers      named barriers, which the machine runs
    instruction   the table of instructions
    arithmetic    arithmetic, logic, comparisons, moves
    conversions   cvt, prmt and packed 16-bit arithmetic
    warps         shfl, vote, redux
"""

from __future__ import annotations

import re

from mlakit.tools.emulator.ptx import arithmetic, conversions, warps
from mlakit.tools.emulator.ptx.barriers import NamedBarrier, named_barrier
from mlakit.tools.emulator.ptx.program import Program, compile_program, statements
from mlakit.tools.emulator.ptx.threads import Threads

__all__ = [
    "LANE_OPERATIONS",
    "NamedBarrier",
    "Program",
    "Threads",
    "compile_program",
    "named_barrier",
    "statements",
]

# importing a topic enters its instructions in the table
TOPICS = (arithmetic, conversions, warps)
# assembly whose result depends on the thread that runs it
LANE_OPERATIONS = re.compile(r"%laneid|shfl\.|vote\.|redux\.")
