"""Assembly that is a named barrier: the machine runs it, for it orders the warps of partitions.

{ .reg .pred is_asked; setp.ne.s32 is_asked, $2, 0; @is_asked bar.sync $1, 256; mov.u32 $0, 0; }
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlakit.tools.emulator.ir import Unsupported
from mlakit.tools.emulator.ptx.program import statements


@dataclass(frozen=True)
class NamedBarrier:
    """A named barrier; `number` and `predicate` are operands of the assembly, 0 for none."""

    mode: str  # sync or arrive
    number: int
    threads: int
    predicate: int = 0


def named_barrier(text: str) -> NamedBarrier | None:
    """Return the named barrier that assembly is; None if it has none.

    Assembly with a barrier may have nothing else but its predicate, and a result that nobody uses.
    """
    listed = statements(text)
    barrier = next((each for each in listed if re.match(r"bar(rier)?\.", each.mnemonic)), None)
    if barrier is None:
        return None
    said = (
        f"{barrier.guard and f'@{barrier.guard} '}{barrier.mnemonic} {','.join(barrier.operands)}"
    )
    found = re.fullmatch(r"(?:@(\w+) )?bar(?:rier)?\.(?:cta\.)?(sync|arrive) \$(\d+),(\d+)", said)
    predicates: dict[str | None, int] = {None: 0}
    others = 0
    for each in listed:
        of = re.fullmatch(r"\$(\d+),0", ",".join(each.operands[1:]))
        if each.mnemonic == "setp.ne.s32" and of:
            predicates[each.operands[0]] = int(of.group(1))
        elif each is not barrier and not each.mnemonic.startswith("mov."):
            others += 1
    if found is None or others or found.group(1) not in predicates:
        raise Unsupported(f"PTX instruction {said} in {' '.join(text.split())}")
    guard, mode, number, threads = found.groups()
    return NamedBarrier(mode, int(number), int(threads), predicates[guard])
