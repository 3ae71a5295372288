"""Dispatch modes that see the torch ops inside mlakit's ops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from mlakit.launch_cache import calls


@contextmanager
def modes_see_inside_ops() -> Iterator[None]:
    """Under a dispatch mode a call is one op, `mlakit::…`; in this scope its body runs in the
    mode instead."""
    with mock.patch.object(calls, "is_intercepted", return_value=False):
        yield
