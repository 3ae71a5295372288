"""Threads that share the work of a CPU kernel in large items: one start and one wait per call.

torch spreads every operation over all its threads and then waits for each of them. Beside another
busy process one of these threads is often not running, and each such wait lasts up to a time slice
of the scheduler, some milliseconds: a call of several hundred operations then takes many times as
long. Here an item (some heads, a split of keys, a query tile) stays on one thread from start to
end, and a thread that has finished an item takes the next one. A thread that is not running delays
its own item only.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from queue import SimpleQueue
from threading import Barrier, Lock, Thread, local
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

SMALL = 2**15  # elements: torch runs an operation on at most this many on one thread


class _ThreadState(local):
    """sharers: in a worker, the threads that work on the items of the call; elsewhere 0."""

    sharers = 0


_thread = _ThreadState()


def for_each(work: Callable[[T], None], items: Iterable[T], *, is_small: bool = False) -> None:
    """work(item) for every item, in any order, on as many threads as torch has.

    is_small  each operation has so few elements that torch keeps it on one thread: the caller's
              thread then does all items, since waking another one takes longer

    Raises the error of a failed item, once no thread works on an item.
    """
    items = list(items)
    threads = 1 if is_small else num_threads()
    if threads == 1 or not items:
        for item in items:
            work(item)
        return
    call = _Call(work, items, threads)
    _pool.run(call)
    call.wait()


def on_one_thread(call: Callable[[], T], device: torch.device) -> T:
    """call(), on the CPU with all its operations on one thread: they are too small to be shared.

    device  of the tensors; on other devices, and under torch.compile, this is just call()
    """
    if device.type != "cpu" or torch.compiler.is_compiling():
        return call()
    results: list[T] = []
    for_each(lambda one: results.append(one()), [call])
    return results[0]


def num_threads() -> int:
    """The threads of `for_each` here: those of torch, or 1 if the work must stay on this thread.

    Modes that see every operation (of the dispatcher, of `torch.func`) belong to one thread. A
    worker has no workers.
    """
    if (
        _thread.sharers
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return 1
    return torch.get_num_threads()


def num_sharers() -> int:
    """The number of items that run at the same time, of this call or of one made here."""
    return _thread.sharers or num_threads()


def num_callers() -> int:
    """The number of items of this call's caller that run at the same time; 1 outside of items."""
    return _thread.sharers or 1


class _Call(Generic[T]):
    """The items of one call, taken by workers one after the other."""

    def __init__(self, work: Callable[[T], None], items: list[T], threads: int) -> None:
        self.work, self.threads = work, threads
        self._items, self._unfinished = deque(items), len(items)
        self._lock, self._done = Lock(), Lock()
        self._error: BaseException | None = None
        self._is_inference = torch.is_inference_mode_enabled()
        self._done.acquire()
        # of the knobs; a context can be entered by one thread at a time
        self.contexts: list[Context] = [copy_context() for _ in range(min(threads, len(items)))]

    def wait(self) -> None:
        """Wait until every item is finished, not for workers that found none."""
        try:
            self._done.acquire()
        except BaseException:  # Ctrl-C: items that have not begun are dropped
            self._drop_items()
            raise
        if self._error is not None:
            raise self._error

    def work_on_items(self) -> None:
        """The loop of a worker."""
        _thread.sharers = self.threads
        with self._mode():
            for item in self._taken():
                try:
                    self.work(item)
                except BaseException as error:  # noqa: BLE001  # raised where the call was made
                    self._error = error
                    self._drop_items()
                self._finish(1)

    def _mode(self) -> AbstractContextManager[object]:
        # modes belong to threads, and inference tensors can be written in inference mode only
        return torch.inference_mode() if self._is_inference else torch.no_grad()

    def _taken(self) -> Iterator[T]:
        while True:
            with self._lock:
                if not self._items:
                    return
                item = self._items.popleft()
            yield item

    def _drop_items(self) -> None:
        with self._lock:
            dropped = len(self._items)
            self._items.clear()
        self._finish(dropped)

    def _finish(self, count: int) -> None:
        with self._lock:
            self._unfinished -= count
            is_last = count > 0 and self._unfinished == 0
        if is_last:
            self._done.release()


class _Pool:
    """Daemon threads, each with one torch thread; more are started when needed."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Context, _Call[Any]]] = SimpleQueue()
        self._lock, self._size = Lock(), 0

    def run(self, call: _Call[Any]) -> None:
        if self._size < call.threads:
            self._grow(call.threads)
        for context in call.contexts:
            self._queue.put((context, call))

    def _grow(self, size: int) -> None:
        with self._lock:
            before, new = torch.get_num_threads(), size - self._size
            if new <= 0:
                return
            started = Barrier(new + 1)
            for _ in range(new):
                Thread(target=self._serve, args=(started,), name="mlakit", daemon=True).start()
            started.wait()
            # a worker's number of threads also becomes that of threads that are new to torch
            torch.set_num_threads(before)
            self._size = size

    def _serve(self, started: Barrier) -> None:
        torch.get_num_threads()  # reads torch's common number once, before this thread's own is set
        torch.set_num_threads(1)
        started.wait()
        while True:
            context, call = self._queue.get()
            context.run(call.work_on_items)
            del context, call  # frees the tensors of the call


_pool = _Pool()


def _forget_workers() -> None:
    """In a forked child, which does not have the parent's threads."""
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)
