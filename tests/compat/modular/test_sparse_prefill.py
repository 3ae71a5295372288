"""`mla_sm100_prefill_sparse`.

The cases plant NaN and garbage wherever nothing may be looked at, and their `check` compares
outputs with float64 oracles, row by row, and asserts that not one other bit was written.
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from mlakit.dispatch import knobs
from tests.compat.modular.attention_cases import SparseCase
from tests.compat.modular.inputs import BF16, E4M3, F16, F32, normal
from tests.compat.modular.parameters import INTEGERS, PAGES, cases, product, table, with_fields

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.hopper_too]


SINKS = [1.5, -20.0, 30.0, -1e38, -torch.inf, torch.inf]
STRIDES = (1, 5, 64, 300)


def drawn_sink(heads: int) -> torch.Tensor:
    return normal(torch.Generator().manual_seed(heads), heads, std=4.0)


@pytest.mark.slow
@cases(
    pages=[
        row | {"layer": 2, "seed": row["heads"], "sink": drawn_sink(row["heads"]) if odd else None}
        for row, odd in zip(PAGES, cycle([False, True]), strict=False)
    ],
    types=table(dtype=[F16, F32, BF16, F16, F32], cache_dtype=[F16, F32, E4M3, E4M3, E4M3]),
    token_scales=[{"has_token_scales": True}],
    integers=with_fields(
        product(table(integers=INTEGERS), table(is_flat=[True, False])), page_size=7
    ),
    sinks=[
        {"dtype": dtype, "cache_dtype": dtype, "heads": len(SINKS), "sink": torch.tensor(sinks)}
        for dtype in (BF16, F32)
        for sinks in (SINKS, *([sink] * len(SINKS) for sink in SINKS))
    ],
    widths=[{"stride": n, "lengths": (n, 0, 1, n // 2, n, 1), "page_size": 64} for n in STRIDES],
)
def test_sparse_prefill_matches_the_oracle(fields):
    case = SparseCase(**fields)
    returned = case.run()
    assert returned.data_ptr() == case.output.view.data_ptr()
    case.check()


@pytest.mark.slow
def test_sparse_prefill_in_a_small_workspace():
    case = SparseCase(heads=128, stride=60, lengths=(60, 0, 33, 1, 60, 8), with_invalid=False)
    with knobs.override(workspace_mib=1):  # one token at a time
        case.run()
    case.check()


@pytest.mark.parametrize("lengths", [(), (0, 0, 0)], ids=["no-tokens", "no-keys"])
def test_sparse_prefill_of_nothing(lengths, generator):
    case = SparseCase(lengths=lengths, sink=normal(generator, 3), with_invalid=False)
    case.run()
    assert bool((case.output.view == 0).all())
    case.check()
