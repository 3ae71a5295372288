"""Blackwell's prefill kernel on a GPU, compared with the oracle on poisoned inputs: run on a B200.

No GPU of this kind has run it yet; `mlakit check --backend blackwell` runs its configurations.
"""

from __future__ import annotations

import pytest

from tests.kernels.blackwell.test_sparse import is_blackwell
from tests.kernels.hopper.test_prefill import LENGTHS, MASKS, case
from tests.pairs import pairwise as every_pair

WIDTHS = ["192/128", "256/256", "128/128"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_blackwell(), reason="needs a GPU of sm_100 or sm_103"),
]


@every_pair(lengths=list(LENGTHS), widths=WIDTHS, mask=list(MASKS))
def test_lengths(lengths, widths, mask):
    kv_lens, q_lens = LENGTHS[lengths]
    case(widths, mask, kv_lens=kv_lens, q_lens=q_lens).run("cuda", "blackwell")


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "fp16"},
        {"sink": "mixed"},
        {"sharpness": -2.0},
        {"sharpness": 0.0},
        {"sharpness": 30.0},
        {"padded": True, "expanded": True, "given_results": True},
        {"wide_indices": True, "heads": 7},
    ],
    ids=str,
)
def test_other_arguments(fields, widths):
    case(widths, kv_lens=(500, 0, 130), q_lens=(200, 0, 130), **fields).run("cuda", "blackwell")


@pytest.mark.parametrize("mask", ["causal", "null", "a window of several blocks"])
@pytest.mark.parametrize("widths", WIDTHS)
def test_many_tiles_of_a_cta(widths, mask):
    lengths = (1, 64, 65, 0, 128, 200, 0, 127, 193, 700) * 4
    contexts = (1, 100, 65, 0, 1000, 333, 77, 127, 321, 700) * 4
    case(widths, mask, kv_lens=contexts, q_lens=lengths, heads=16).run("cuda", "blackwell")
