"""One line in an engine's log says what serves the layers of a backend. Imports no engine."""

from __future__ import annotations

import logging

from mlakit import PagedLatentCache
from mlakit.dispatch import selection

_ANNOUNCED: set[str] = set()


def announce(logger: logging.Logger, backend: str, op: str, pool: PagedLatentCache) -> None:
    """Log once for each backend, after a call of an op: its kernels, and the format of rows."""
    if backend in _ANNOUNCED:
        return
    _ANNOUNCED.add(backend)
    codec = pool.codec
    logger.info(
        "%s: %s by %s over rows of %s, %d bytes a token, %d tokens a page",
        backend,
        op,
        ", ".join(selection.chosen(op)),
        codec.name,
        codec.bytes_per_token,
        pool.page_size,
    )
