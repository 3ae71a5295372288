"""The suite `long-context`: a chunk of a prompt over a long cached context, `mla_step`.

Step    append 2048 new tokens, expand the context part by part, attend, merge
Kernels the up-projection of every part, and the attention over it, each alone; their sum is what
        the step cannot beat unless it overlaps them
Memory  K and V of a part, in two buffers; the whole context would need 64 KB per token
Check   some tokens, all heads, and their cache rows against the float64 oracle
"""

from __future__ import annotations

from dataclasses import dataclass

from mlakit.tools.bench import branch
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.suite import Workload


@dataclass(frozen=True)
class LongContext(branch.Step):
    """One layer's step of the newest tokens of a prompt."""

    max_rounds = 12  # of milliseconds each

    @property
    def name(self) -> str:
        return super().name.replace("step-", "long-context-", 1)


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = shape.accept("long-context", "heads", "format", "page_size")
    return (LongContext(shape.batch, **given),)  # type: ignore[arg-type]  # checked by their options


CHUNK = 2048  # new tokens
CONTEXTS = (16 << 10, 32 << 10, 64 << 10, 128 << 10)  # tokens, the new ones included
WORKLOADS: tuple[Workload, ...] = (
    *(LongContext(Batch.of(1, CHUNK, context)) for context in CONTEXTS),
    LongContext(Batch.of(1, CHUNK, 128 << 10), heads=16),
    LongContext(Batch.of(4, CHUNK, 32 << 10)),
)
