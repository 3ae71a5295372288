"""The tokens that one rank of a context-parallel group caches."""

from __future__ import annotations

from typing import NamedTuple


class KVShard(NamedTuple):
    """Which tokens of every request one rank of a context-parallel group caches.

    Position p is cached by rank (p // interleave) % world; a rank stores its positions in order.
    """

    rank: int
    world: int
    interleave: int = 1

    def local_count(self, num_tokens: int) -> int:
        """How many of the positions [0, num_tokens) this rank caches."""
        period = self.interleave * self.world
        full, rest = divmod(num_tokens, period)
        mine = min(max(rest - self.rank * self.interleave, 0), self.interleave)
        return full * self.interleave + mine


UNSHARDED = KVShard(0, 1)
"""One rank caches all tokens."""
