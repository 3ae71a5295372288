"""Every public op on random problems, on every backend that takes them.

The examples are the same in every run; with `--hypothesis-seed=random` (or a number) pytest looks
at others, and at more of them. `test_mutations` shows that they kill mutants.
"""

from __future__ import annotations

import pytest

from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.tools.workloads import CASES
from mlakit.tools.workloads.random_cases import CACHED, UNCACHED
from tests.ops.random_cases import LARGE, PROPERTIES, Exploration, Property

# rows without scales, like those of bf16
LIKE_BF16 = ("fp16", "fp32")


def is_repeated(checked: Property) -> bool:
    """Whether an interpreted kernel takes the same path as for another format.

    `indexer_select` scores with the kernel of `indexer_logits`, which is run on every format.
    """
    repeated = LIKE_BF16
    if checked.spec.op == "indexer_select":
        repeated += ("fp8", "fp8_block128", "fp8_block64")
    return checked.spec.backend == "triton" and checked.name.endswith(
        tuple(f"-{format}" for format in repeated)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "checked",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.thorough] if is_repeated(each) else [])
        for each in PROPERTIES
    ],
)
def test_random_problems_match_the_oracle(checked, device, pytestconfig):
    if pytestconfig.getoption("--hypothesis-seed") is None:
        exploration = checked.explore(device.type)
    else:
        exploration = Exploration(checked.spec, device)
        exploration.over(checked.strategy, examples_of=None)
    if exploration.num_taken == 0:
        pytest.skip(exploration.refusal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "case"),
    [
        pytest.param(spec, case, id=f"{spec}-{i}")
        for i, case in enumerate(LARGE)
        for spec in selection.specs(case.op)
    ],
)
def test_large_problems_match_the_oracle(spec, case, device):
    try:
        case.run(device, spec.name)
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))


def test_every_op_has_a_case():
    assert {case.op for case in CASES} == set(selection.OPS)
    assert set(CASES) == {*CACHED, *UNCACHED}
