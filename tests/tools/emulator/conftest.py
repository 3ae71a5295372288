"""A process for the emulator, which the tests of one worker share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.tools.emulator.processes import compiling_process


@pytest.fixture(scope="session")
def in_emulator() -> Iterator[Callable[..., Any]]:
    """Call a function in the process, and return its result."""
    with compiling_process() as pool:
        yield lambda function, *args: pool.submit(function, *args).result()
