"""The base class of cases: one call in plain values, with seeded inputs and an oracle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import cycle
from types import ModuleType
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from mlakit import reference
from mlakit.dispatch import knobs
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.knobs import Backend
from mlakit.reference import batched
from mlakit.tools.testing import assert_matches, assert_same_bits
from mlakit.tools.workloads.inputs import Inputs

FEW_COLUMNS = 64  # fewer columns than this are few

Results: TypeAlias = tuple[Tensor, ...]
Oracle: TypeAlias = Literal["loop", "batched"]


@dataclass(frozen=True, eq=False)
class Trial:
    """A case on a device: `call` the op on a backend, then `check` its results.

    calls  consecutive calls of `run`, which must all return the same bits
    names  of the results
    """

    inputs: Inputs
    call: Callable[[Backend], Results]
    check: Callable[[Results], None]
    calls: int = 1
    names: Sequence[str] = ()

    def run(self, backend: Backend) -> None:
        """Assert that the results are correct and that nothing else was written."""
        before = self.inputs.snapshot()
        results = self.call(backend)
        for number in range(2, self.calls + 1):
            earlier = [result.clone() for result in results]
            self.inputs.poison_results()
            results = self.call(backend)
            for name, got, want in zip(cycle(self.names), results, earlier, strict=False):
                assert_same_bits(f"{name} of call {number}", got, want)
        self.inputs.assert_only_written(before)
        self.check(results)


@dataclass(frozen=True, kw_only=True, repr=False)
class Case(ABC):
    """One call of a public op. Its repr is a constructor call with the non-default values.

    seed           of all random numbers
    padded         padded strides instead of packed tensors
    workspace_mib  scratch memory of a CPU kernel: less memory means more tiles
    """

    op: ClassVar[str]
    seed: int = 0
    padded: bool = False
    workspace_mib: int = 64

    @abstractmethod
    def trial(self, device: torch.device | str) -> Trial:
        """Inputs on `device`, made from the seed."""

    def run(self, device: torch.device | str = "cpu", backend: Backend = "auto") -> None:
        """Call the op and check its results; an AssertionError begins with the repeat command.

        Raises UnsupportedError if the backend does not support the problem.
        """
        with knobs.override(workspace_mib=self.workspace_mib):
            try:
                self.trial(device).run(backend)
            except UnsupportedError:
                raise
            except Exception as error:
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                command = self.reproduction(device, backend)
                raise AssertionError(f"{command}\n{kind}{error}") from error

    def reproduction(self, device: torch.device | str = "cpu", backend: Backend = "auto") -> str:
        """A shell command that runs this case."""
        arguments = {"device": str(device), "backend": backend}
        defaults = {"device": "cpu", "backend": "auto"}
        given = [
            f"{name}={value!r}" for name, value in arguments.items() if value != defaults[name]
        ]
        name, listed = type(self).__name__, ", ".join(given)
        return f'python -c "from mlakit.tools.workloads import {name}; {self!r}.run({listed})"'

    def __repr__(self) -> str:
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        given = (f"{name}={value!r}" for name, value, default in values if value != default)
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class BatchedCase(Case):
    """A case with two oracles; a GPU checks thousands a minute with the batched one.

    oracle  "loop": one query at a time, on the CPU; "batched": all queries of a request at once, on
            the device, which also draws the inputs
    calls   consecutive calls, which must all return the same bits; the last is checked. From the
            third on a GPU may replay the recorded launches of the second.
    """

    oracle: Oracle = "loop"
    calls: int = 1

    def inputs(self, device: torch.device | str) -> Inputs:
        """Inputs for `device`, drawn where the oracle runs."""
        return Inputs(device, self.seed, padded=self.padded, draws_there=self.oracle == "batched")

    @property
    def reference(self) -> ModuleType:
        """The oracles."""
        return batched if self.oracle == "batched" else reference


def assert_logits_match(
    name: str, actual: Tensor, exact: Tensor, naive: Tensor, largest: Tensor
) -> None:
    """`assert_matches` for float32 sums that may cancel: logits, and the logs of their sums.

    largest  broadcasts over `exact`: the largest magnitude of a logit's terms. The tolerance is at
             least one rounding of it, even for a small logit with an accurate naive run.
    """
    loss = naive.double() - exact
    rounding = torch.finfo(torch.float32).eps / 2 * largest.double().expand_as(exact)
    away = loss.abs().maximum(rounding)
    widened = exact + torch.where(loss < 0, -away, away)
    assert_matches(name, actual, exact, torch.where(exact.isfinite(), widened, naive.double()))


def weights_dtype(out: Tensor, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to which a naive oracle for `out` rounds its softmax weights; None: not rounded.

    With few columns the terms may cancel in all of them, and rounding the weights loses more than
    rounding the result. With many columns exact weights give the stricter tolerance.
    """
    is_naive_of_few = dtype != torch.float64 and out.shape[-1] < FEW_COLUMNS
    return out.dtype if is_naive_of_few else None


def assert_given(name: str, result: Tensor, given: Tensor | None) -> None:
    """Assert that the op returned the caller's tensor, if the caller gave one."""
    if given is not None and result is not given:
        raise AssertionError(f"{name}: the result is not the tensor the call was given")
