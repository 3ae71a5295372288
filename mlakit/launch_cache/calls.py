"""The calls of one op: which are replayed, which are recorded, which run in full, and why.

The first call with a certain key runs in full, the second is recorded, later ones are replayed.
Where a recording is refused, another is tried 1, 2, 4, … 64 calls with this key later: what stood
in its way may pass, such as a constant that the GPU is still computing.

A key has two parts: one describes the tensors, the other is the rest. Describing ten tensors takes
Python longer than launching kernels. So the recordings used last are found by the rest of the key,
and torch compares all tensors with theirs in one call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mlakit.dispatch import knobs, private
from mlakit.launch_cache.counters import stats_of
from mlakit.launch_cache.key import split, tensor_key
from mlakit.launch_cache.plain import has_plain_memory, is_plain

if TYPE_CHECKING:  # it needs Triton, which is installed where a call is worth recording
    from mlakit.launch_cache.record import Recording

Results = tuple[Tensor, ...]
Key = tuple[object, ...]  # without the part that describes the tensors
Arguments = tuple[Any, ...]  # a record of `mlakit.kernels.arguments`
Body = Callable[[Any, Sequence[Tensor | None]], Results]
MAX_KNOWN = 1024  # calls of one op that are remembered, at a few kilobytes each
MAX_RECENT = 4  # recordings of calls that differ in their tensors only
MAX_WAIT = 64  # calls between two attempts to record


class Recent(NamedTuple):
    """A recording that was used lately."""

    is_alike: Callable[..., bool]  # do other tensors have the key of the recorded ones?
    recording: Recording


@dataclass
class Waiting:
    """A key without a recording."""

    calls: int = 0  # that run in full before the next attempt
    wait: int = 1  # calls to wait after that attempt, if it is refused
    refusal: str | None = None  # of the last attempt

    def after(self, refusal: str) -> Waiting:
        return Waiting(self.wait - 1, min(2 * self.wait, MAX_WAIT), refusal)


class RecordedCalls:
    """The recorded calls of one op.

    run       runs a call in full
    dispatch  runs a call through torch's dispatcher, which unwraps or refuses its tensors
    """

    def __init__(self, op: str, run: Body, dispatch: Body) -> None:
        self._op, self._run, self._dispatch = op, run, dispatch
        self._stats = stats_of(op)
        self._recent: OrderedDict[Hashable, tuple[Recent, ...]] = OrderedDict()
        self._known: OrderedDict[Hashable, Recording | Waiting] = OrderedDict()

    def call(self, arguments: Arguments, results: tuple[Tensor | None, ...]) -> Results:
        """The results of the op; `results` are the caller's, or None for new ones."""
        backend, may_replay = knobs.for_launch_cache()
        tensors, rest = split(arguments + results)
        key: Key = (backend, torch.is_grad_enabled(), *rest)
        got = self._replay_recent(key, tensors) if may_replay else None
        if got is not None:
            return got
        if len(set(map(id, tensors))) < len(tensors):
            key, tensors = _without_duplicates(key, tensors)
            got = self._replay_recent(key, tensors) if may_replay else None
            if got is not None:
                return got
        if is_intercepted() or not all(is_plain(t) or _is_meta(t) for t in tensors):
            return self._dispatch(arguments, results)
        return self._call_unseen(key, tensors, arguments, results)

    def call_plain(
        self, arguments: Arguments, results: tuple[Tensor | None, ...]
    ) -> Results | None:
        """Run `call` below torch's dispatcher; return None if the values of a tensor are not in its
        memory."""
        backend, may_replay = knobs.for_launch_cache()
        tensors, rest = split(arguments + results)
        key, tensors = _without_duplicates((backend, torch.is_grad_enabled(), *rest), tensors)
        if not all(map(has_plain_memory, tensors)):
            return None
        got = self._replay_recent(key, tensors) if may_replay else None
        return self._call_unseen(key, tensors, arguments, results) if got is None else got

    def _replay_recent(self, key: Key, tensors: list[Tensor]) -> Results | None:
        """Replay the recording that fits these tensors; return None if there is none. Arguments
        that are the same tensor fit none before `_without_duplicates`."""
        try:
            recent = self._recent.get(key, ())
        except TypeError:  # a list where a number should be: the op says what is wrong with it
            return None
        for is_alike, recording in recent:
            if (
                is_alike(*tensors)
                and private.dispatch_modes() == 0
                and not private.is_transformed()
                and recording.device_index == private.current_device()
                and not recording.has_launch_hooks()
                and (got := recording.replay(tensors)) is not None
            ):
                self._stats.hits += 1
                return got
        return None

    def _call_unseen(
        self,
        key: Key,
        tensors: list[Tensor],
        arguments: Arguments,
        results: tuple[Tensor | None, ...],
    ) -> Results:
        """A call that is not among the recent ones: look at every tensor."""
        device = tensors[0].device if tensors else torch.device("cpu")
        if not _has_kernels(device):
            return self._run(arguments, results)
        with made_current(device):
            refusal = _why_not() or _why_not_now(tensors, device)
            if refusal is not None:
                self._stats.refused[refusal] += 1
                return self._run(arguments, results)
            whole_key = key, tensor_key(tensors)
            try:
                known = self._known.get(whole_key)
            except TypeError:
                return self._run(arguments, results)  # raises: see `_replay_recent`
            if known is None:
                self._stats.misses += 1
                got = self._run(arguments, results)
                _keep(self._known, whole_key, Waiting())  # only now: a wrong call is not remembered
                return got
            if isinstance(known, Waiting):
                return self._record(whole_key, known, tensors, arguments, results)
            return self._replay(key, known, tensors, arguments, results)

    def _record(
        self,
        key: Hashable,
        known: Waiting,
        tensors: list[Tensor],
        arguments: Arguments,
        results: tuple[Tensor | None, ...],
    ) -> Results:
        if known.calls > 0:
            known.calls -= 1
            self._stats.refused[known.refusal or ""] += 1
            return self._run(arguments, results)
        from mlakit.launch_cache.record import record

        got, recording = record(self._run, arguments, results, tensors)
        if isinstance(recording, str):
            self._stats.refused[recording] += 1
            _keep(self._known, key, known.after(recording))
        else:
            self._stats.misses += 1
            _keep(self._known, key, recording)
        return got

    def _replay(
        self,
        key: Key,
        recording: Recording,
        tensors: list[Tensor],
        arguments: Arguments,
        results: tuple[Tensor | None, ...],
    ) -> Results:
        if recording.has_launch_hooks():
            self._stats.refused["a launch hook of Triton is set"] += 1
            return self._run(arguments, results)
        is_alike = private.comparison_with(tensors)
        if is_alike is not None:
            others = self._recent.get(key, ())[: MAX_RECENT - 1]
            _keep(self._recent, key, (Recent(is_alike, recording), *others))
        got = recording.replay(tensors)
        assert got is not None, "the key has the alignment of every tensor"
        self._stats.hits += 1
        return got


def _without_duplicates(key: Key, tensors: list[Tensor]) -> tuple[Key, list[Tensor]]:
    """Return a key that says which arguments are one tensor, and the tensors, each once."""
    ids = tuple(map(id, tensors))
    if len(set(ids)) == len(ids):
        return key, tensors
    pattern = tuple(map(ids.index, ids))
    return (*key, pattern), list(dict(zip(ids, tensors, strict=True)).values())


def _keep(table: OrderedDict[Hashable, Any], key: Hashable, value: object) -> None:
    table[key] = value
    if len(table) > MAX_KNOWN:
        table.popitem(last=False)


def _why_not() -> str | None:
    """Return why no call is replayed at present."""
    if is_intercepted():
        return "a dispatch mode of torch is active"
    if not knobs.launch_cache():
        return f"{knobs.launch_cache.variable} is off"
    return f"{knobs.check_values.variable} is on" if knobs.check_values() else None


def _why_not_now(tensors: Sequence[Tensor], device: torch.device) -> str | None:
    """Return why this call is neither replayed nor recorded."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "a tensor requires grad"  # the op refuses it
    if any(tensor.device != device for tensor in tensors):
        return "its tensors are on several devices"
    # events cannot be queried, and kernels may not be loaded, while a graph is captured
    return "a CUDA graph is being captured" if _is_capturing() else None


def is_intercepted() -> bool:
    """Return whether a dispatch mode or a transform of torch.func sees every call."""
    return private.dispatch_modes() > 0 or private.is_transformed()


def _is_meta(tensor: Tensor) -> bool:
    """Return whether a tensor has no memory. The op refuses it, which the dispatcher would not."""
    return tensor.device.type == "meta"


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _has_kernels(device: torch.device) -> bool:
    """Return whether Triton's kernels run on a device."""
    return device.type == "cuda"


def made_current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels start on the current device, which must be that of the tensors."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
