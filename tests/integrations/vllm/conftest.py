"""The ranks of a gloo group, for tests of shards."""

from tests.parallel.conftest import _kept_ranks, ranks

__all__ = ["_kept_ranks", "ranks"]
