"""Faults of kernels: what the emulator reports.

Each class names one kind of broken guarantee; the message names the operation, its source line and
the value that breaks the rule.
"""

from __future__ import annotations


class Fault(Exception):
    """A kernel does what the hardware does not define, or does not allow."""


class Deadlock(Fault):
    """Every partition waits, and no operation is in flight."""


class Race(Fault):
    """Two accesses conflict, and neither is ordered before the other."""


class MissingFence(Fault):
    """The generic and the asynchronous proxy access the same bytes without a proxy fence."""


class UseBeforeWait(Fault):
    """The result of an asynchronous product is used before a wait for it."""


class OutOfBounds(Fault):
    """An access is outside of the memory that the kernel was given."""


class BarrierMisuse(Fault):
    """An mbarrier or a named barrier is used in a way that its definition does not cover."""


class UnfinishedAtExit(Fault):
    """A CTA ends while operations that it issued are in flight."""


class IllegalCopy(Fault):
    """A TMA descriptor or a TMA copy breaks a rule of the hardware: an illegal instruction."""
