"""The tokens that one rank of a context-parallel group caches."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from torch import Tensor

Positions = TypeVar("Positions", int, Tensor)


class KVShard(NamedTuple):
    """The share of every request's tokens that one rank of a context-parallel group caches.

    Position p is cached by rank (p // interleave) % world; a rank stores its positions in order.
    """

    rank: int
    world: int
    interleave: int = 1

    def owner(self, position: Positions) -> Positions:
        """The rank that caches a position."""
        return position // self.interleave % self.world

    def local_position(self, position: Positions) -> Positions:
        """The place of a position among those that its rank caches."""
        period = self.interleave * self.world
        return position // period * self.interleave + position % self.interleave

    def local_count(self, num_tokens: int) -> int:
        """Return how many of the positions [0, num_tokens) this rank caches."""
        period = self.interleave * self.world
        full, rest = divmod(num_tokens, period)
        mine = min(max(rest - self.rank * self.interleave, 0), self.interleave)
        return full * self.interleave + mine


UNSHARDED = KVShard(0, 1)
"""One rank caches all tokens."""
