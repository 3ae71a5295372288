"""What a mutant of a CPU kernel must not pass: the random problems of its op.

A mutation is of a kernel as a whole (its arguments or its results, by name) or of a line of it.
"""

from __future__ import annotations

from functools import partial

from hypothesis import Phase

from mlakit.dispatch import selection
from mlakit.dispatch.specs import KernelSpec
from mlakit.formats import FORMATS
from mlakit.tools.workloads import Case
from tests.kernel_launchers import by_name
from tests.mutations import Mutation, of_kernel, of_source
from tests.ops.mutations.changes import After, Before
from tests.ops.random_cases import LARGE, PROPERTIES, Exploration, any_case

# a failure says how to run its problem again
REPRODUCTION = r'^python -c "from mlakit.tools.workloads import'


def kernel(
    case: type[Case],
    name: str,
    before: Before = lambda a: {},
    after: After = lambda a: None,
    formats: tuple[str, ...] = FORMATS,
) -> Mutation:
    """The named arguments of a kernel are changed before it runs, or its results after."""
    check = partial(passes_random_problems, case, name, formats)
    return of_kernel(
        case.op, name, by_name(before, after), check, backend="cpu", error=REPRODUCTION
    )


def line(case: type[Case], module: str, name: str, old: str, new: str) -> Mutation:
    """A line of a module of the CPU kernels has `new` where it had `old`."""
    check = partial(passes_property_tests, case.op)
    return of_source(
        f"mlakit.kernels.cpu.{module}", f"{case.op} {name}", old, new, check, REPRODUCTION
    )


def passes_random_problems(case: type[Case], examples_of: str, formats: tuple[str, ...]) -> None:
    Exploration(cpu_kernel(case.op), "cpu").over(
        any_case(case, formats),
        examples_of=examples_of,
        max_examples=150,
        phases=[Phase.generate],
    )


def passes_property_tests(op: str) -> None:
    """The problems of the op's own tests for its CPU kernel, the same examples."""
    spec = cpu_kernel(op)
    for each in PROPERTIES:
        if each.spec == spec:
            each.explore("cpu", phases=[Phase.generate])
    for case in LARGE:
        if case.op == op:
            case.run("cpu", spec.name)


def cpu_kernel(op: str) -> KernelSpec:
    (spec,) = (each for each in selection.specs(op) if each.backend == "cpu")
    return spec
