"""The logger `mlakit`: which kernels run and why, and what is compiled, at level INFO."""

from __future__ import annotations

import logging

from mlakit.dispatch import knobs

LOGGER = logging.getLogger("mlakit")


def is_on() -> bool:
    """Return whether lines of level INFO are written. `MLAKIT_LOG=1` sends them to stderr."""
    if knobs.log() and not any(isinstance(each, _ToStderr) for each in LOGGER.handlers):
        handler = _ToStderr()
        handler.setFormatter(logging.Formatter("mlakit: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
    return LOGGER.isEnabledFor(logging.INFO)


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]  # not a class with parameters
    """The handler of `MLAKIT_LOG`, known by its type."""
