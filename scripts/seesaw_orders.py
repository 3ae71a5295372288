"""The warpgroups of `mla_decode_kernel` in random orders: does one read too early, or write what is
still being read, or do all wait? Two of them, or three in every second order, where rows come one
by one and `decode_copier` copies them.

    python scripts/seesaw_orders.py            20000 orders of the protocol as it is
    python scripts/seesaw_orders.py --broken   the same with mistakes in it, which must be found

A model, to be changed with the kernel: what a warpgroup does is a generator, which yields wherever
another may go on, and a (barrier, parity) where it waits. Copies land whenever they like. A dot
reads its operands from when it is begun until it is waited for. A buffer holds a label that says
what was written to it, so whoever reads can tell whether that is what it should be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field
from random import Random

from rich.console import Console
from rich.progress import track

Steps = Generator[tuple[str, int] | None, None, None]
Reads = list[tuple[str, Hashable]]
Label = tuple[int, int]  # unit, pair of blocks
ORDERS = 20_000
LANDING = -1  # of a copy, beside what warpgroups do
MISTAKES = {
    "one box for the rotated queries of both": "q_rope",
    "the right half of an even block reloaded before its values are added": "reload",
    "a unit's queries loaded before the other warpgroup is at the end of the last": "queries",
    "the second block of a pair copied before the first": "copier",
    "a part copied before it is free": "free",
}
CONSOLE = Console()


class WrongError(Exception):
    """What no order may lead to."""


@dataclass
class Buffer:
    label: Hashable = None
    readers: int = 0
    is_being_written: bool = False


@dataclass
class Barrier:
    phase: int = 0
    has_arrived: bool = False
    copies: int = 0  # that are still to land

    def settle(self) -> None:
        if self.has_arrived and self.copies == 0:
            self.phase += 1
            self.has_arrived = False


@dataclass
class Program:
    """A program with so many pairs of blocks in each unit."""

    random: Random
    units: Sequence[int]
    mistake: str = ""
    has_copier: bool = False
    buffers: dict[str, Buffer] = field(default_factory=dict)
    barriers: dict[str, Barrier] = field(default_factory=dict)
    in_flight: list[tuple[str, str, Hashable]] = field(default_factory=list)

    def buffer(self, name: str) -> Buffer:
        return self.buffers.setdefault(name, Buffer())

    def barrier(self, name: str) -> Barrier:
        return self.barriers.setdefault(name, Barrier())

    def is_over(self, name: str, parity: int) -> bool:
        return self.barrier(name).phase % 2 != parity

    def arrive(self, name: str) -> None:
        barrier = self.barrier(name)
        if barrier.has_arrived:
            raise WrongError(f"{name} is arrived at twice")
        barrier.has_arrived = True
        barrier.settle()

    def load(self, barrier: str, *boxes: tuple[str, Hashable]) -> None:
        """Or tell the copier that it may."""
        if self.has_copier and barrier != "q":
            self.arrive(f"{barrier} free")
        else:
            self.copy(barrier, *boxes)

    def copy(self, barrier: str, *boxes: tuple[str, Hashable]) -> None:
        self.barrier(barrier).copies += len(boxes)
        for name, label in boxes:
            self._own(name).is_being_written = True
            self.in_flight.append((barrier, name, label))
        self.arrive(barrier)

    def land(self) -> None:
        at = self.random.randrange(len(self.in_flight))
        barrier, name, label = self.in_flight.pop(at)
        self.buffers[name] = Buffer(label)
        self.barrier(barrier).copies -= 1
        self.barrier(barrier).settle()

    def store(self, name: str, label: Hashable) -> None:
        self._own(name).label = label

    def begin(self, *reads: tuple[str, Hashable]) -> Reads:
        for name, label in reads:
            buffer = self.buffer(name)
            if buffer.is_being_written or buffer.label != label:
                raise WrongError(f"{name} is read as {label}, and holds {buffer.label}")
            buffer.readers += 1
        return list(reads)

    def end(self, reads: Reads) -> None:
        for name, _ in reads:
            self.buffer(name).readers -= 1

    def read(self, name: str, label: Hashable) -> None:
        self.end(self.begin((name, label)))

    def _own(self, name: str) -> Buffer:
        buffer = self.buffer(name)
        if buffer.readers or buffer.is_being_written:
            raise WrongError(f"{name} is written while it is read or written")
        return buffer


def even(program: Program) -> Steps:
    """As `_warpgroup` with `_even_pair`."""
    p = program
    _load_even(p, 0)
    yield None
    p.load("left_odd", ("K1 left", (0, 0)))
    first = 0  # pairs of the units before
    for unit, num_pairs in enumerate(p.units):
        yield "q", unit % 2
        p.read("p_even", ("q", unit))
        yield None
        p.arrive("scores_even")
        scores = yield from _even_scores(p, (unit, 0), first % 2)
        yield None
        p.end(scores)
        for pair in range(num_pairs):
            yield from _even_pair(p, (unit, pair), (first + pair) % 2, pair == num_pairs - 1)
        p.store("sum_even", unit)
        p.arrive("sum_even")
        if p.mistake != "queries":
            yield "sum_odd", unit % 2
        if unit + 1 < len(p.units):
            _load_even(p, unit + 1)
        yield "sum_odd", unit % 2
        p.read("sum_odd", unit)
        yield None
        p.store("K1 left", "result")
        yield None
        p.read("K1 left", "result")
        yield None
        if unit + 1 < len(p.units):
            p.load("left_odd", ("K1 left", (unit + 1, 0)))
        first += num_pairs


def _even_pair(p: Program, now: Label, parity: int, is_last: bool) -> Steps:
    """A pair of blocks, and the scores of the next one."""
    then = now[0], now[1] + 1
    if not is_last:
        p.load("rope_even", ("K0 rope", then))
    yield None
    p.store("max_even", now)
    yield None
    p.store("p_even", now)
    yield None
    p.arrive("p_even")
    yield None
    if is_last:
        p.store("K0 left", now)  # its rows past the end become zeros
    yield "scores_odd", parity
    values = p.begin(("K0 left", now))
    yield None
    p.end(values)
    if not is_last:
        p.load("left_even", ("K0 left", then))
    yield None
    yield "p_odd", parity
    p.read("max_odd", now)
    yield None
    if is_last:
        p.store("K1 left", now)
    values = p.begin(("p_odd", now), ("K1 left", now))
    yield None
    if is_last:
        p.end(values)
        return
    yield "rope_even", parity ^ 1
    rotated = p.begin(("K0 rope", then))
    yield None
    p.end(values)
    p.load("left_odd", ("K1 left", then))
    yield None
    scores = yield from _even_scores(p, then, parity ^ 1, has_rotated=True)
    p.arrive("scores_even")
    yield None
    p.end(rotated + scores)


def odd(program: Program) -> Steps:
    """As `_warpgroup` with `_odd_pair`."""
    p = program
    _load_odd(p, 0)
    yield None
    first = 0
    for unit, num_pairs in enumerate(p.units):
        yield "q", unit % 2
        p.read("p_even" if p.mistake == "q_rope" else "p_odd", ("q", unit))
        yield None
        scores = yield from _odd_scores(p, (unit, 0), first % 2)
        yield None
        p.end(scores)
        for pair in range(num_pairs):
            yield from _odd_pair(p, (unit, pair), (first + pair) % 2, pair == num_pairs - 1)
        p.store("sum_odd", unit)
        p.arrive("sum_odd")
        yield "sum_even", unit % 2
        p.read("sum_even", unit)
        yield None
        p.store("K1 right", "result")
        yield None
        p.read("K1 right", "result")
        yield None
        if unit + 1 < len(p.units):
            _load_odd(p, unit + 1)
        first += num_pairs


def _odd_pair(p: Program, now: Label, parity: int, is_last: bool) -> Steps:
    """Likewise."""
    then = now[0], now[1] + 1
    if not is_last:
        p.load("rope_odd", ("K1 rope", then))
    yield None
    yield "p_even", parity
    p.read("max_even", now)
    yield None
    if is_last:
        p.store("K0 right", now)
    values = p.begin(("p_even", now), ("K0 right", now))
    yield None
    p.store("max_odd", now)
    yield None
    p.store("p_odd", now)
    p.arrive("p_odd")
    yield None
    if p.mistake == "reload" and not is_last:
        p.load("right_even", ("K0 right", then))
    p.end(values)
    yield None
    if is_last:
        p.store("K1 right", now)
    values = p.begin(("K1 right", now))
    yield None
    if p.mistake != "reload" and not is_last:
        p.load("right_even", ("K0 right", then))
    yield None
    p.end(values)
    if is_last:
        return
    p.load("right_odd", ("K1 right", then))
    yield None
    scores = yield from _odd_scores(p, then, parity ^ 1)
    yield None
    p.end(scores)


def copier(program: Program) -> Steps:
    """As `copy_pairs`."""
    p = program
    blocks = [("K0", "even"), ("K1", "odd")]
    if p.mistake == "copier":
        blocks.reverse()
    phase = 0
    for unit, num_pairs in enumerate(p.units):
        for pair in range(num_pairs):
            for block, name in blocks:
                for part in ("rope", "left", "right"):
                    if p.mistake != "free":
                        yield f"{part}_{name} free", phase
                    p.copy(f"{part}_{name}", (f"{block} {part}", (unit, pair)))
                    yield None
            phase ^= 1


def _load_even(p: Program, unit: int) -> None:
    p.load("rope_even", ("K0 rope", (unit, 0)))
    p.load("left_even", ("K0 left", (unit, 0)))
    rotated = ("q", unit)
    p.load("q", ("p_even", rotated), ("p_odd", rotated), ("q left", unit), ("q right", unit))
    p.load("right_even", ("K0 right", (unit, 0)))


def _load_odd(p: Program, unit: int) -> None:
    p.load("rope_odd", ("K1 rope", (unit, 0)))
    p.load("right_odd", ("K1 right", (unit, 0)))


def _even_scores(
    p: Program, block: Label, parity: int, *, has_rotated: bool = False
) -> Generator[tuple[str, int] | None, None, Reads]:
    reads: Reads = []
    if not has_rotated:
        yield "rope_even", parity
        reads += p.begin(("K0 rope", block))
    yield "left_even", parity
    reads += p.begin(("K0 left", block), ("q left", block[0]))
    yield "right_even", parity
    reads += p.begin(("K0 right", block), ("q right", block[0]))
    return reads


def _odd_scores(
    p: Program, block: Label, parity: int
) -> Generator[tuple[str, int] | None, None, Reads]:
    yield "scores_even", parity
    yield "rope_odd", parity
    reads = p.begin(("K1 rope", block))
    yield "right_odd", parity
    reads += p.begin(("K1 right", block), ("q right", block[0]))
    yield "left_odd", parity
    reads += p.begin(("K1 left", block), ("q left", block[0]))
    p.arrive("scores_odd")
    return reads


def run(seed: int, mistake: str = "") -> None:
    """One order. Raises `WrongError`."""
    random = Random(seed)
    units = [random.choice([1, 1, 2, 3, 4, 5]) for _ in range(random.choice([1, 2, 3, 4]))]
    program = Program(random, units, mistake, has_copier=seed % 2 == 1)
    # now and then one of them, or the copies, are much quicker or slower than the rest
    copies, *speeds = random.choice(
        [(1, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 1, 8), (8, 1, 1, 1), (1, 9, 9, 9)]
    )
    warpgroups = [even(program), odd(program)]
    if program.has_copier:
        warpgroups.append(copier(program))
    waits: dict[int, tuple[str, int] | None] = dict.fromkeys(range(len(warpgroups)))
    while waits:
        ready = [who for who, wait in waits.items() if wait is None or program.is_over(*wait)]
        weights = [speeds[who] for who in ready]
        if program.in_flight:
            ready.append(LANDING)
            weights.append(copies)
        if not ready:
            raise WrongError(f"all wait: {list(waits.values())}")
        who = random.choices(ready, weights)[0]
        if who == LANDING:
            program.land()
            continue
        try:
            waits[who] = next(warpgroups[who])
        except StopIteration:
            del waits[who]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--orders", type=int, default=ORDERS)
    parser.add_argument("--broken", action="store_true")
    asked = parser.parse_args()
    if not asked.broken:
        for seed in track(range(asked.orders), description="orders", console=CONSOLE):
            try:
                run(seed)
            except WrongError as error:
                sys.exit(f"order {seed}: {error}")
        CONSOLE.print(f"{asked.orders} orders, nothing wrong.")
        return
    for name, mistake in MISTAKES.items():
        found = sum(is_wrong(seed, mistake) for seed in range(asked.orders // 10))
        CONSOLE.print(f"{name}: noticed in {found} of {asked.orders // 10} orders")
        if found == 0:
            sys.exit(1)


def is_wrong(seed: int, mistake: str) -> bool:
    try:
        run(seed, mistake)
    except WrongError:
        return True
    return False


if __name__ == "__main__":
    main()
