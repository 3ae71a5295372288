"""Recorded launches: a repeated eager call on a GPU launches its recorded kernels again.

Checking a call's arguments, choosing its kernels and letting Triton look at every argument takes
Python hundreds of microseconds. All of it follows from the call's *key*: shapes, strides, dtypes,
devices and alignment of its tensors, which of them are the same tensor, numbers, strings, knobs.
The second call with the same key is recorded; later ones launch the recorded kernels on their own
tensors, which is called a replay.

calls        per op: finds the recording of a call, decides when to record (`RecordedCalls`)
key          the key of a call
plain        which tensors are plain
record       runs a call with stand-ins for its tensors and notes each launch (`Recording`)
counters     how often calls were replayed, and why not

Launchers take results and scratch from `kernels.workspace`, which tells a recording of them.
`dispatch.private` has the private interfaces of torch and Triton that this needs.
`MLAKIT_LAUNCH_CACHE=0` turns it off. `stats()` counts, per op, calls that were replayed, that ran
in full because nothing was recorded yet, and that ran in full for a reason. `mlakit.stats()` has
them, too, beside the kernels that were chosen, compiled and loaded.
"""

from __future__ import annotations

from mlakit.launch_cache.counters import OpStats, reset_stats, stats

__all__ = ["OpStats", "reset_stats", "stats"]
