"""Launch replay: a repeated eager call on a GPU launches its recorded kernels again.

Checking a call's arguments, choosing its kernels and letting Triton look at every argument takes
Python hundreds of microseconds. All of it follows from the call's *key*: shapes, strides, dtypes,
devices and alignment of its tensors, which of them are the same tensor, numbers, strings, knobs.
The second call with the same key is recorded; later ones launch the recorded kernels on their own
tensors.

calls        per op: finds the recording of a call, decides when to record (`RecordedCalls`)
key          the key of a call
plain        which tensors are plain
workspace    where launchers take results and scratch from
record       runs a call with stand-ins for its tensors and notes each launch (`Recording`)
launchers    how a recorded launch is made again, one file per Triton version
counters     how often calls were replayed, and why not

`MLAKIT_REPLAY=0` turns replay off. `stats()` counts, per op, calls that were replayed, that ran in
full because nothing was recorded yet, and that ran in full for a reason.
"""

from __future__ import annotations

from mlakit.launch_cache.counters import OpStats, reset_stats, stats

__all__ = ["OpStats", "reset_stats", "stats"]
