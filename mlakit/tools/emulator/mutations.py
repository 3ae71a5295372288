"""Deliberate faults in the synchronisation of a kernel, made in its TTGIR.

Each mutant differs in one operation from the kernel. A mutant that no check and no wrong result
catches is either equivalent (the operation is redundant), or shows what is not modelled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator


def mutants(text: str) -> Iterator[tuple[str, int, str]]:
    """(kind, number of the line, the IR of the mutant)."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        for kind, replacement in _of_line(line):
            yield kind, i + 1, "\n".join([*lines[:i], *replacement, *lines[i + 1 :]])


def _of_line(line: str) -> Iterator[tuple[str, list[str]]]:
    if "ttng.wait_barrier" in line:
        yield "drop a wait", []
        found = re.match(r"(\s*)ttng\.wait_barrier (%\S+), (%[^\s,]+)(.*)$", line)
        if found:
            space, barrier, phase, rest = found.groups()
            yield (
                "wait for the other phase",
                [
                    f"{space}%mutant_one = arith.constant 1 : i32",
                    f"{space}%mutant_phase = arith.xori {phase}, %mutant_one : i32",
                    f"{space}ttng.wait_barrier {barrier}, %mutant_phase{rest}",
                ],
            )
    elif "ttng.arrive_barrier" in line:
        yield "drop an arrival", []
    elif "ttng.fence_async_shared" in line:
        yield "drop a fence", []
    elif "ttng.barrier_expect" in line:
        found = re.match(r"(.*ttng\.barrier_expect %\S+, )(\d+)(.*)$", line)
        assert found
        yield "expect fewer bytes", [f"{found.group(1)}{int(found.group(2)) // 2}{found.group(3)}"]
    elif "ttng.init_barrier" in line:
        found = re.match(r"(.*ttng\.init_barrier %\S+, )(\d+)(.*)$", line)
        assert found
        yield "one arrival more", [f"{found.group(1)}{int(found.group(2)) + 1}{found.group(3)}"]
    elif "ttng.warp_group_dot_wait" in line:
        found = re.search(r"pendings = (\d+)", line)
        assert found
        more = line.replace(found.group(), f"pendings = {int(found.group(1)) + 1}")
        yield "wait for one wgmma less", [more]
    elif "ttng.tc_gen5_commit" in line:
        yield "drop a commit", []
    elif "ttng.tc_gen5_mma" in line:
        without = re.sub(r", (%[^\s\[,]+\[%[^\s\],]+\](?:, )?)+", " ", line, count=1)
        if without != line:
            yield "drop the barriers of a tcgen05", [without]
    elif "ttng.async_tma_store_wait" in line:
        yield "drop a wait for TMA stores", []
    elif "ttng.async_copy_mbarrier_arrive" in line:
        yield "drop the arrival of copies", []
    elif "tt.elementwise_inline_asm" in line and re.search(r"bar\.(sync|arrive)", line):
        kind = "wait" if "bar.sync" in line else "arrival"
        found = re.match(r"(\s*)(%\S+) = ", line)
        assert found
        yield f"drop a named {kind}", [f"{found.group(1)}{found.group(2)} = arith.constant 0 : i32"]
