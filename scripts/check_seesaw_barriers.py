"""Checks the barriers of `m64_bf16` in a model whose warpgroups run in random orders.

    python scripts/check_seesaw_barriers.py            20000 orders of the protocol
    python scripts/check_seesaw_barriers.py --mutate   mutations of it, which must all be found

An error is a read before its copy has landed, an overwrite of data that is still read, or a
deadlock. Every second order has a gather producer as third warpgroup. The model follows the kernel:
change both together. A warpgroup is a generator that yields where another may run, and yields
(barrier, phase) where it waits. Copies land at random times. A wgmma reads its operands from its
issue until it is waited for. A buffer holds a label of its contents, which every read checks.
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
Label = tuple[int, int]  # work tile, pair of blocks
ORDERS = 20_000
LANDING = -1  # a copy lands instead of a warpgroup running
MUTATIONS = {
    "both warpgroups share one smem tile of rope queries": "q_rope",
    "the right half of an even block is reloaded before its PV product": "reload",
    "the next tile's queries are loaded before the other warpgroup finishes this tile": "queries",
    "the second block of a pair is loaded before the first": "gather_producer",
    "a part is loaded before it is empty": "free",
}
CONSOLE = Console()


class OrderError(Exception):
    """A race or a deadlock."""


@dataclass
class Buffer:
    label: Hashable = None
    readers: int = 0
    is_being_written: bool = False


@dataclass
class Barrier:
    phase: int = 0
    has_arrived: bool = False
    copies: int = 0  # still in flight

    def settle(self) -> None:
        if self.has_arrived and self.copies == 0:
            self.phase += 1
            self.has_arrived = False


@dataclass
class Cta:
    """A CTA; `tiles` has the number of block pairs of each work tile."""

    random: Random
    tiles: Sequence[int]
    mutation: str = ""
    has_gather: bool = False
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
            raise OrderError(f"{name} is arrived at twice")
        barrier.has_arrived = True
        barrier.settle()

    def load(self, barrier: str, *copies: tuple[str, Hashable]) -> None:
        """Start a copy, or release the part to the gather producer."""
        if self.has_gather and barrier != "q":
            self.arrive(f"{barrier} empty")
        else:
            self.copy(barrier, *copies)

    def copy(self, barrier: str, *copies: tuple[str, Hashable]) -> None:
        self.barrier(barrier).copies += len(copies)
        for name, label in copies:
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
                raise OrderError(f"{name} is read as {label}, and holds {buffer.label}")
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
            raise OrderError(f"{name} is written while it is read or written")
        return buffer


def even(cta: Cta) -> Steps:
    """As `_warpgroup` with `_even_pair`."""
    p = cta
    _load_even(p, 0)
    yield None
    p.load("left_odd", ("K1 left", (0, 0)))
    first = 0  # pairs in the previous work tiles
    for tile, num_pairs in enumerate(p.tiles):
        yield "q", tile % 2
        p.read("p_even", ("q", tile))
        yield None
        p.arrive("scores_even")
        scores = yield from _even_scores(p, (tile, 0), first % 2)
        yield None
        p.end(scores)
        for pair in range(num_pairs):
            yield from _even_pair(p, (tile, pair), (first + pair) % 2, pair == num_pairs - 1)
        p.store("sum_even", tile)
        p.arrive("sum_even")
        if p.mutation != "queries":
            yield "sum_odd", tile % 2
        if tile + 1 < len(p.tiles):
            _load_even(p, tile + 1)
        yield "sum_odd", tile % 2
        p.read("sum_odd", tile)
        yield None
        p.store("K1 left", "result")
        yield None
        p.read("K1 left", "result")
        yield None
        if tile + 1 < len(p.tiles):
            p.load("left_odd", ("K1 left", (tile + 1, 0)))
        first += num_pairs


def _even_pair(p: Cta, now: Label, parity: int, is_last: bool) -> Steps:
    """A pair of blocks, and the scores of the next pair."""
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
        p.store("K0 left", now)  # zeroes the rows past the end
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


def odd(cta: Cta) -> Steps:
    """As `_warpgroup` with `_odd_pair`."""
    p = cta
    _load_odd(p, 0)
    yield None
    first = 0
    for tile, num_pairs in enumerate(p.tiles):
        yield "q", tile % 2
        p.read("p_even" if p.mutation == "q_rope" else "p_odd", ("q", tile))
        yield None
        scores = yield from _odd_scores(p, (tile, 0), first % 2)
        yield None
        p.end(scores)
        for pair in range(num_pairs):
            yield from _odd_pair(p, (tile, pair), (first + pair) % 2, pair == num_pairs - 1)
        p.store("sum_odd", tile)
        p.arrive("sum_odd")
        yield "sum_even", tile % 2
        p.read("sum_even", tile)
        yield None
        p.store("K1 right", "result")
        yield None
        p.read("K1 right", "result")
        yield None
        if tile + 1 < len(p.tiles):
            _load_odd(p, tile + 1)
        first += num_pairs


def _odd_pair(p: Cta, now: Label, parity: int, is_last: bool) -> Steps:
    """The same for the odd warpgroup."""
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
    if p.mutation == "reload" and not is_last:
        p.load("right_even", ("K0 right", then))
    p.end(values)
    yield None
    if is_last:
        p.store("K1 right", now)
    values = p.begin(("K1 right", now))
    yield None
    if p.mutation != "reload" and not is_last:
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


def gather_producer(cta: Cta) -> Steps:
    """As `gather_producer`."""
    p = cta
    blocks = [("K0", "even"), ("K1", "odd")]
    if p.mutation == "gather_producer":
        blocks.reverse()
    phase = 0
    for tile, num_pairs in enumerate(p.tiles):
        for pair in range(num_pairs):
            for block, name in blocks:
                for part in ("rope", "left", "right"):
                    if p.mutation != "free":
                        yield f"{part}_{name} empty", phase
                    p.copy(f"{part}_{name}", (f"{block} {part}", (tile, pair)))
                    yield None
            phase ^= 1


def _load_even(p: Cta, tile: int) -> None:
    p.load("rope_even", ("K0 rope", (tile, 0)))
    p.load("left_even", ("K0 left", (tile, 0)))
    rotated = ("q", tile)
    p.load("q", ("p_even", rotated), ("p_odd", rotated), ("q left", tile), ("q right", tile))
    p.load("right_even", ("K0 right", (tile, 0)))


def _load_odd(p: Cta, tile: int) -> None:
    p.load("rope_odd", ("K1 rope", (tile, 0)))
    p.load("right_odd", ("K1 right", (tile, 0)))


def _even_scores(
    p: Cta, block: Label, parity: int, *, has_rotated: bool = False
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
    p: Cta, block: Label, parity: int
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


def run(seed: int, mutation: str = "") -> None:
    """Run one order. Raises `OrderError`."""
    random = Random(seed)
    tiles = [random.choice([1, 1, 2, 3, 4, 5]) for _ in range(random.choice([1, 2, 3, 4]))]
    cta = Cta(random, tiles, mutation, has_gather=seed % 2 == 1)
    # in some orders one warpgroup, or the copies, are much faster or slower
    copies, *speeds = random.choice(
        [(1, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 1, 8), (8, 1, 1, 1), (1, 9, 9, 9)]
    )
    warpgroups = [even(cta), odd(cta)]
    if cta.has_gather:
        warpgroups.append(gather_producer(cta))
    waits: dict[int, tuple[str, int] | None] = dict.fromkeys(range(len(warpgroups)))
    while waits:
        ready = [chosen for chosen, wait in waits.items() if wait is None or cta.is_over(*wait)]
        weights = [speeds[chosen] for chosen in ready]
        if cta.in_flight:
            ready.append(LANDING)
            weights.append(copies)
        if not ready:
            raise OrderError(f"deadlock: {list(waits.values())}")
        chosen = random.choices(ready, weights)[0]
        if chosen == LANDING:
            cta.land()
            continue
        try:
            waits[chosen] = next(warpgroups[chosen])
        except StopIteration:
            del waits[chosen]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--orders", type=int, default=ORDERS)
    parser.add_argument("--mutate", action="store_true")
    asked = parser.parse_args()
    if not asked.mutate:
        for seed in track(range(asked.orders), description="orders", console=CONSOLE):
            try:
                run(seed)
            except OrderError as error:
                sys.exit(f"order {seed}: {error}")
        CONSOLE.print(f"{asked.orders} orders, no error.")
        return
    for name, mutation in MUTATIONS.items():
        found = sum(finds_error(seed, mutation) for seed in range(asked.orders // 10))
        CONSOLE.print(f"{name}: found in {found} of {asked.orders // 10} orders")
        if found == 0:
            sys.exit(1)


def finds_error(seed: int, mutation: str) -> bool:
    try:
        run(seed, mutation)
    except OrderError:
        return True
    return False


if __name__ == "__main__":
    main()
