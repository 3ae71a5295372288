"""Blackwell's indexer kernel on a GPU, compared with the oracle on poisoned inputs: run on a B200.

No GPU of this kind has run it yet; `mlakit check --backend blackwell` runs its configurations.
"""

from __future__ import annotations

import pytest

from mlakit.tools.workloads import IndexerLogitsCase
from tests.kernels.blackwell.test_sparse import is_blackwell
from tests.kernels.hopper.test_indexer import KEYS, LENGTHS
from tests.pairs import pairwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_blackwell(), reason="needs a GPU of sm_100 or sm_103"),
]


def run(**fields: object) -> None:
    IndexerLogitsCase(**{**KEYS, "dtype": "e4m3", "heads": 64, **fields}).run("cuda", "blackwell")


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(lengths, heads):
    kv_lens, q_lens = LENGTHS[lengths]
    run(kv_lens=kv_lens, q_lens=q_lens, heads=heads)


@pytest.mark.parametrize("heads", [1, 31, 33, 63])
@pytest.mark.parametrize("q_len", [1, 2, 4, 9])
def test_heads(q_len, heads):
    run(kv_lens=(300, 64), q_lens=(q_len, q_len), heads=heads)


@pairwise(
    q_len=[1, 2, 4, 9],
    fields=[
        {"mask": "null"},
        {"page_size": 192},
        {"num_layers": 2},
        {"wide_indices": True},
        {"given_results": True},
        {"spare_columns": None},
        {"spare_columns": 20000},
        {"power_of_two": True},
    ],
)
def test_forms_of_arguments(fields, q_len):
    run(**{"kv_lens": (400, 65), "q_lens": (q_len, q_len), **fields})


@pytest.mark.parametrize("mask", ["causal", "null"])
@pytest.mark.parametrize("q_lens", [(1,), (4,), (1, 2, 0, 5) * 30, (2000, 1)], ids=str)
def test_many_tiles_of_a_cta(q_lens, mask):
    kv_lens = tuple(9000 + 77 * i for i in range(len(q_lens)))
    run(kv_lens=kv_lens, q_lens=q_lens, mask=mask)
