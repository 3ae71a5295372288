"""Barriers: mbarriers in shared memory, and the hardware's named barriers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from mlakit.tools.emulator.clocks import Clock
from mlakit.tools.emulator.faults import BarrierMisuse

MAX_COUNT = 2**20 - 1  # of arrivals, and of bytes in either direction
BARRIER_BYTES = 8
NUM_NAMED = 16
WARP = 32  # threads


@dataclass
class Barrier:
    """An mbarrier: an arrival count, a transaction count in bytes and a phase.

    PTX, "mbarrier": a phase completes when the pending arrivals and the transaction count are both
    zero, and the arrival count is then that of the next phase.

    count     arrivals of a phase
    agent     stands for the TMA loads that complete on it
    number    the time at which the agent of its CTA initialises it, if that is fenced
    phase     the number of completed phases
    pending   arrivals that the current phase still needs
    bytes     expected bytes that have not arrived
    clock     what has happened before the arrivals so far
    complete  what had happened before the last phase was complete
    initialiser, initialised  the partition that initialised it, and when
    first_copy  the time of its agent before the first copy
    used      by agent, the time of its last operation on the barrier
    """

    count: int
    name: str
    agent: int
    number: int = 0
    phase: int = 0
    pending: int = 0
    bytes: int = 0
    clock: Clock = field(default_factory=Clock)
    complete: Clock = field(default_factory=Clock)
    is_valid: bool = True
    initialiser: int = 0
    initialised: int = 0
    first_copy: int = 0
    used: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the count: PTX, "mbarrier.init": the valid range of the count is 1 to 2^20 − 1."""
        if not 1 <= self.count <= MAX_COUNT:
            raise BarrierMisuse(
                f"barrier {self.name}: the count of arrivals must be 1 to {MAX_COUNT},"
                f" got {self.count}"
            )
        self.pending = self.count

    def arrive(self, count: int = 1) -> None:
        """Count arrivals.

        PTX, "mbarrier.arrive": the count of an arrival must be in the range of the mbarrier's
        contents, so a phase cannot have more arrivals than it was initialised with.
        """
        if not 1 <= count <= self.pending:
            raise BarrierMisuse(
                f"{self}: {count} arrivals, and a phase has {self.count} of which"
                f" {self.pending} are missing"
            )
        self.pending -= count
        self._advance()

    def expect(self, size: int) -> None:
        """Expect `size` bytes more in this phase, and arrive (mbarrier.arrive.expect_tx)."""
        self._add_bytes(size)
        self.arrive()

    def transfer(self, size: int, issued_in: int) -> None:
        """Count bytes that have arrived (complete-tx), of a copy issued in phase `issued_in`.

        A copy belongs to the phase that it is issued in: if the barrier expects fewer bytes than
        are copied, the phase completes without some of them, and they count for the next one.
        """
        if self.phase != issued_in:
            raise BarrierMisuse(
                f"{self}: {size} bytes arrive that were issued in phase {issued_in}; the barrier"
                " expected fewer bytes than are copied"
            )
        self._add_bytes(-size)
        self._advance()

    def _add_bytes(self, size: int) -> None:
        """Change the transaction count.

        PTX, "mbarrier", "tx-count": its valid range is −(2^20 − 1) to 2^20 − 1.
        """
        self.bytes += size
        if abs(self.bytes) > MAX_COUNT:
            raise BarrierMisuse(f"{self}: the transaction count must be within ±{MAX_COUNT} bytes")

    def _advance(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.complete = self.clock.copy()

    def has_passed(self, parity: int) -> bool:
        """Is the phase of this parity complete (mbarrier.try_wait.parity)?

        A parity names the current phase or the one before it: on a fresh barrier the phase of
        parity 1 counts as complete.
        """
        return self.phase & 1 != parity & 1

    @property
    def last_copy(self) -> int:
        """The time of the agent of TMA loads for copies of the current phase."""
        return self.first_copy + self.phase + 1

    def check_unused(self, action: str) -> None:
        """Report an initialisation or invalidation between the arrivals of a phase."""
        if self.pending != self.count or self.bytes:
            raise BarrierMisuse(f"{self}: {action} in the middle of a phase")

    def __str__(self) -> str:
        return (
            f"barrier {self.name} (phase {self.phase}, {self.pending} of {self.count} arrivals"
            f" and {self.bytes} bytes missing)"
        )


Arrival: TypeAlias = tuple[int, list[int], int]  # a partition's agent, its warps, its time


class NamedBarrier:
    """One of the 16 barriers of a CTA that bar.sync and bar.arrive name.

    PTX, "bar, barrier": the barrier completes when the expected number of threads has arrived, and
    is then ready for reuse. The number is a multiple of the warp size and the same at each arrival.
    """

    def __init__(self, number: int) -> None:
        if not 0 <= number < NUM_NAMED:
            raise BarrierMisuse(f"there are {NUM_NAMED} named barriers, got number {number}")
        self.number = number
        self.threads = 0
        self.of = 0  # threads that complete the current generation
        self.generation = 0
        self.clock, self.complete = Clock(), Clock()
        self.is_divided = False  # some warps of a partition arrived without the others
        self.arrivals: list[Arrival] = []  # of the current generation
        self.before: list[Arrival] = []  # of the last complete one

    def arrive(self, agent: int, warps: list[int], of: int, clock: Clock, time: int) -> int:
        """Count the threads of a partition's warps, which arrive at its `time`.

        Returns the generation that is complete when all `of` threads are there.
        """
        if of % WARP or of <= 0:
            raise BarrierMisuse(
                f"named barrier {self.number}: the number of threads must be a multiple of {WARP},"
                f" got {of}"
            )
        if self.threads and of != self.of:
            raise BarrierMisuse(
                f"named barrier {self.number}: every thread must name the same number of threads,"
                f" got {of} and {self.of}"
            )
        if any(who == agent and not set(warps).isdisjoint(some) for who, some, _ in self.arrivals):
            raise BarrierMisuse(f"named barrier {self.number}: a warp arrives twice")
        generation, self.of = self.generation, of
        self.clock.join(clock)
        self.arrivals.append((agent, warps, time))
        self.threads += len(warps) * WARP
        if self.threads > of:
            raise BarrierMisuse(f"named barrier {self.number}: {self.threads} threads of {of}")
        if self.threads == of:
            self.threads, self.generation = 0, self.generation + 1
            self.before, self.arrivals = self.arrivals, []
            self.complete = self.clock.copy()
        return generation
