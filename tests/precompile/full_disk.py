"""A cache of kernels on a disk that is full before the first kernel is done.

Triton takes it by the environment variable TRITON_CACHE_MANAGER, in processes that compile too.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from triton.runtime.cache import FileCacheManager


class FullDisk(FileCacheManager):
    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        if filename.endswith(".cubin"):  # what is smaller still fits
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path: str = super().put(data, filename, binary)
        return path
