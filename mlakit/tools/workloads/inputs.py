"""The tensors of a trial: seeded, surrounded by poison, and checked for writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlakit.formats import saturating_cast
from mlakit.tools.testing import Snapshot, assert_unchanged, poison, snapshot

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
}
GUARD = 64  # elements of poison before and after a packed tensor
PAD_BYTES = 16  # poison between the rows of a padded one


class Inputs:
    """Makes random numbers on the CPU, the same for every device, and copies them to `device`. With
    `draws_there` the device makes them: other numbers, much faster.

    Each tensor has its own memory, which is poison before and after it and, if `padded`, between
    its rows. `assert_only_written` compares all of that memory.
    """

    def __init__(
        self,
        device: torch.device | str,
        seed: int,
        *,
        padded: bool = False,
        draws_there: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.padded = padded
        self.drawn_on = self.device if draws_there else torch.device("cpu")
        self.generator = torch.Generator(self.drawn_on).manual_seed(seed)
        self._memory: dict[str, Tensor] = {}
        self._writable: dict[str, Tensor] = {}
        self._results: list[Tensor] = []

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(
            shape, generator=self.generator, dtype=torch.float32, device=self.drawn_on
        )

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * self._rand(shape)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.drawn_on)

    def chance(self, probability: float, *shape: int) -> Tensor:
        return self._rand(shape) < probability

    def any_of(self, values: Sequence[int], *shape: int) -> Tensor:
        """int64, each element one of `values`."""
        return torch.tensor(values, dtype=torch.int64, device=self.drawn_on)[
            self.integers(0, len(values), *shape)
        ]

    def _rand(self, shape: Sequence[int]) -> Tensor:
        return torch.rand(
            shape, generator=self.generator, dtype=torch.float32, device=self.drawn_on
        )

    def queries(self, tokens: int, heads: int, width: int) -> Tensor:
        """Normal numbers; heads differ in magnitude: some attend broadly, some sharply."""
        return self.normal(tokens, heads, width) * self.uniform(-2, 1, heads, 1).exp2()

    def sink(self, kind: str, heads: int) -> Tensor | None:
        """ "": none. "finite": logits of the size of scores. "mixed": also -inf and +inf heads."""
        if not kind:
            return None
        sink = 2 * self.normal(heads) + 2
        if kind == "mixed":
            extreme = self.integers(0, 3, heads)
            sink[extreme == 1], sink[extreme == 2] = -torch.inf, torch.inf
        return self.place("sink", sink)

    def place(self, name: str, values: Tensor, dtype: str | torch.dtype | None = None) -> Tensor:
        """`values` on the device, in `dtype` where one is given."""
        kind = DTYPES[dtype] if isinstance(dtype, str) else dtype or values.dtype
        view = self._enclosed(name, values.shape, kind)
        view.copy_(saturating_cast(values, kind) if kind != values.dtype else values)
        return view

    def place_ints(self, name: str, values: Sequence[int], *, wide: bool = False) -> Tensor:
        """int32 [n], or int64 if `wide`."""
        dtype = torch.int64 if wide else torch.int32
        return self.place(name, torch.tensor(list(values), dtype=dtype, device="cpu"))

    def result(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A poisoned tensor for the op to write to."""
        view = self._enclosed(name, shape, dtype)
        self.allow(name, view)
        self._results.append(view)
        return view

    def poison_results(self) -> None:
        """Poison the results again, between two calls."""
        for result in self._results:
            poison(result)

    def watch(self, name: str, memory: Tensor) -> None:
        """Compare `memory`, contiguous, after the call."""
        if name in self._memory:
            raise ValueError(f"Inputs: {name} exists already")
        self._memory[name] = memory

    def allow(self, name: str, view: Tensor, rows: tuple[Tensor | int, ...] = ()) -> None:
        """Allow writes to `view`, a view of the memory of `name`: to all of it, or to `rows`.

        rows  an index into the leading axes of `view`
        """
        memory = self._memory[name]
        if name not in self._writable:
            self._writable[name] = torch.zeros(memory.shape, dtype=torch.bool, device=memory.device)
        writable = self._writable[name]
        seen = writable.as_strided(view.shape, view.stride(), view.storage_offset())
        seen[rows or ...] = True

    def snapshot(self) -> Snapshot:
        return snapshot(**self._memory)

    def assert_only_written(self, before: Snapshot) -> None:
        """Assert that only memory named by `allow` was written since `before`."""
        assert_unchanged(before, written=self._writable)

    def _enclosed(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A view of `shape` into poisoned memory on the device."""
        *leading, columns = shape
        if self.padded and leading:
            pad = max(PAD_BYTES // dtype.itemsize, 1)
            sizes = [*(size + 2 for size in leading), columns + 2 * pad]
            memory = torch.empty(sizes, dtype=dtype, device=self.device)
            view = memory[(*(slice(1, -1) for _ in leading), slice(pad, pad + columns))]
        else:
            elements = torch.Size(shape).numel()
            memory = torch.empty(elements + 2 * GUARD, dtype=dtype, device=self.device)
            view = memory[GUARD : GUARD + elements].view(*shape)
        self.watch(name, poison(memory))
        return view
