"""The ranks, shared by the tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.ranks import Ranks


@pytest.fixture(scope="session")
def _kept_ranks() -> Iterator[list[Ranks]]:
    kept: list[Ranks] = []
    yield kept
    for each in kept:
        each.close()


@pytest.fixture
def ranks(_kept_ranks: list[Ranks], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Processes of a gloo group; new ones after a failure."""
    if not _kept_ranks or not _kept_ranks[-1].is_usable:
        _kept_ranks.append(Ranks(tmp_path_factory.mktemp("ranks")))
    return _kept_ranks[-1]
