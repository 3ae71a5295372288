"""The bytes of one kind of cache."""

from __future__ import annotations

from dataclasses import dataclass

from mlakit.cache import KVShard


@dataclass(frozen=True)
class CacheSize:
    """The bytes of one kind of cache, all layers together.

    token_bytes       one token of the model, without padding of pages
    rank_token_bytes  the same on one rank, on average
    page_bytes        one page on one rank, as a new pool allocates it
    shards            ranks that the tokens are divided over
    """

    name: str
    token_bytes: int
    rank_token_bytes: float
    page_bytes: int
    page_size: int
    shards: int

    def pages(self, context: int) -> int:
        """Pages of one request on the rank that has the most."""
        return -(-KVShard(0, self.shards).local_count(context) // self.page_size)

    def rank_bytes(self, context: int, batch: int = 1) -> int:
        return batch * self.pages(context) * self.page_bytes

    def max_tokens(self, free_bytes: int) -> int:
        """Tokens of all requests that fit on the ranks, if every page is full."""
        return max(free_bytes, 0) // self.page_bytes * self.page_size * self.shards
