"""Engines whose release a test invents."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlakit.integrations import releases


@pytest.fixture(autouse=True)
def _no_release_of_another_test() -> Iterator[None]:
    releases.installed_version.cache_clear()
    yield
    releases.installed_version.cache_clear()
