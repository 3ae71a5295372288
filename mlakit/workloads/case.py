"""What a case is: one call in plain values, made concrete from a seed, judged by its oracle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from mlakit import knobs
from mlakit.checks import UnsupportedError
from mlakit.knobs import Backend
from mlakit.testing import assert_matches
from mlakit.workloads.stage import Stage

FEW_COLUMNS = 64  # fewer than these

Results: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Trial:
    """A case on a device: `call` the op on a backend, then `check` what came back."""

    stage: Stage
    call: Callable[[Backend], Results]
    check: Callable[[Results], None]

    def run(self, backend: Backend) -> None:
        """Assert that the results are right and that nothing else was written."""
        before = self.stage.snapshot()
        results = self.call(backend)
        self.stage.assert_only_written(before)
        self.check(results)


@dataclass(frozen=True, kw_only=True, repr=False)
class Case(ABC):
    """One call of a public op. Its repr is a constructor call that names what is not default.

    seed           of every number drawn
    padded         strided tensors instead of packed ones
    workspace_mib  scratch memory a CPU kernel may use: with less of it, it works in more tiles
    """

    op: ClassVar[str]
    seed: int = 0
    padded: bool = False
    workspace_mib: int = 64

    @abstractmethod
    def trial(self, device: torch.device | str) -> Trial:
        """Inputs on `device`, drawn from the seed."""

    def run(self, device: torch.device | str = "cpu", backend: Backend = "auto") -> None:
        """Call the op and judge all it did; an AssertionError begins with how to do this again.

        Raises UnsupportedError where the backend refuses the problem.
        """
        with knobs.override(workspace_mib=self.workspace_mib):
            try:
                self.trial(device).run(backend)
            except UnsupportedError:
                raise
            except Exception as error:
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                again = self.reproduction(device, backend)
                raise AssertionError(f"{again}\n{kind}{error}") from error

    def reproduction(self, device: torch.device | str = "cpu", backend: Backend = "auto") -> str:
        """A shell command that runs this case."""
        arguments = {"device": str(device), "backend": backend}
        defaults = {"device": "cpu", "backend": "auto"}
        given = [
            f"{name}={value!r}" for name, value in arguments.items() if value != defaults[name]
        ]
        name = type(self).__name__
        return f'python -c "from mlakit.workloads import {name}; {self!r}.run({", ".join(given)})"'

    def __repr__(self) -> str:
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        given = (f"{name}={value!r}" for name, value, default in values if value != default)
        return f"{type(self).__name__}({', '.join(given)})"


def assert_logits_match(
    name: str, actual: Tensor, exact: Tensor, naive: Tensor, largest: Tensor
) -> None:
    """`assert_matches` for float32 sums that may cancel: logits, and the logs of their sums.

    largest  broadcasts over `exact`: the size the terms of a logit may reach. Any run may lose one
             rounding of it, however small the logit and however lucky the naive run.
    """
    loss = naive.double() - exact
    rounding = torch.finfo(torch.float32).eps / 2 * largest.double().expand_as(exact)
    widened = exact + torch.where(loss < 0, -1.0, 1.0) * loss.abs().maximum(rounding)
    assert_matches(name, actual, exact, torch.where(exact.isfinite(), widened, naive.double()))


def weights_dtype(out: Tensor, dtype: torch.dtype) -> torch.dtype | None:
    """What the weights of an oracle in `dtype` are rounded to, if it is to be naive for `out`.

    In few columns terms may cancel in all of them: what is lost of the weights is then more than
    of the result. In many it is not, and a naive run with exact weights is the stricter one.
    """
    is_naive_of_few = dtype != torch.float64 and out.shape[-1] < FEW_COLUMNS
    return out.dtype if is_naive_of_few else None


def assert_given(name: str, result: Tensor, given: Tensor | None) -> None:
    """Assert that the caller's tensor, where there is one, is what came back."""
    if given is not None and result is not given:
        raise AssertionError(f"{name}: the result is not the tensor the call was given")
