"""`mla_sm100_prefill_sparse`.

The cases plant NaN and garbage wherever nothing may be looked at, and their `check` compares
outputs with float64 oracles, row by row, and asserts that not one other bit was written.
"""

from __future__ import annotations

import pytest
import torch

from mlakit.dispatch import knobs
from tests.compat.modular.attention_cases import SparseCase
from tests.compat.modular.inputs import BF16, E4M3, F16, F32, PAGES_AND_HEADS, normal
from tests.compat.modular.parameters import integer_types, taking_turns

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.hopper_too]


@pytest.mark.slow
@taking_turns(("page_size", "heads"), PAGES_AND_HEADS, has_sink=[False, True])
def test_sparse_prefill_matches_the_oracle(page_size, heads, has_sink, generator):
    sink = normal(generator, heads, std=4.0) if has_sink else None
    case = SparseCase(seed=page_size, page_size=page_size, heads=heads, sink=sink, layer=2)
    returned = case.run()
    assert returned.data_ptr() == case.output.view.data_ptr()
    case.check()


@pytest.mark.parametrize(
    ("dtype", "cache"), [(F16, F16), (F32, F32), (BF16, E4M3), (F16, E4M3), (F32, E4M3)], ids=str
)
def test_sparse_prefill_in_every_type(dtype, cache):
    case = SparseCase(dtype=dtype, cache_dtype=cache)
    case.run()
    case.check()


def test_sparse_prefill_of_rows_with_a_scale_per_token():
    case = SparseCase(has_token_scales=True)
    case.run()
    case.check()


@integer_types
@pytest.mark.parametrize("is_flat", [True, False], ids=["1d", "2d"])
def test_sparse_prefill_takes_every_integer_type(integer_type, is_flat):
    case = SparseCase(integers=integer_type, is_flat=is_flat, page_size=7)
    case.run()
    case.check()


SINKS = [1.5, -20.0, 30.0, -1e38, -torch.inf, torch.inf]


@pytest.mark.parametrize("sink", [*SINKS, None], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_sparse_prefill_with_every_kind_of_sink(sink, dtype):
    heads = len(SINKS)
    sinks = torch.tensor(SINKS) if sink is None else torch.full((heads,), sink)
    case = SparseCase(heads=heads, sink=sinks, dtype=dtype, cache_dtype=dtype)
    case.run()
    case.check()


@pytest.mark.parametrize("stride", [1, 5, 64, 300])
def test_sparse_prefill_takes_lists_of_any_width(stride):
    case = SparseCase(stride=stride, lengths=(stride, 0, 1, stride // 2, stride, 1), page_size=64)
    case.run()
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
