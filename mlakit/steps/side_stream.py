"""Further streams of a GPU, for work that need not wait for the stream of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

MAX_SIDE_TOKENS = 256  # whose products leave SMs idle; those of more fill the GPU on their own


@lru_cache(maxsize=64)
def side_stream(device: torch.device, number: int = 0) -> torch.cuda.Stream:
    """The same for all who need one: each waits for its own stream first, and is waited for."""
    return torch.cuda.Stream(device)


class SideStreams:
    """Forks kernels off to side streams, beside those that the current stream gets meanwhile.

    `join` lets the current stream wait for them: before that none of their results may be used
    there, and no tensor of theirs may be released. After it memory needs no further care: side
    streams begin with a wait for the current one.

    Only in a CUDA graph, where branches cost nothing. Elsewhere the host takes longer to launch
    small kernels than the GPU to run them, and everything runs on the current stream.
    """

    def __init__(self, device: torch.device, *, is_worthwhile: bool = True) -> None:
        self._device = device
        self._used: list[int] = []
        self._here: torch.cuda.Stream | None = None
        if is_worthwhile and device.type == "cuda" and _is_capturing():
            self._here = torch.cuda.current_stream(device)

    @contextmanager
    def stream(self, number: int = 0, *, after: int | None = None) -> Iterator[None]:
        """A block on this side stream, after what the current stream got before the block.

        after  a side stream to wait for instead
        """
        if self._here is None:
            yield
            return
        aside = side_stream(self._device, number)
        aside.wait_stream(self._here if after is None else side_stream(self._device, after))
        if number not in self._used:
            self._used.append(number)
        with torch.cuda.stream(aside):
            yield

    def join(self) -> None:
        """Let the current stream wait for the side streams."""
        if self._here is not None:
            for number in self._used:
                self._here.wait_stream(side_stream(self._device, number))


def _is_capturing() -> bool:
    return not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()
