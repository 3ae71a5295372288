"""Blackwell's FP8 prefill kernel on a GPU, compared with the oracle on poisoned inputs.

No GPU of this kind has run it yet; `mlakit check --backend blackwell` runs its configurations.
"""

from __future__ import annotations

import pytest

from tests.kernels.blackwell.test_sparse import is_blackwell
from tests.kernels.hopper.test_prefill_fp8 import LENGTHS, MASKS, WIDTHS, case
from tests.pairs import pairwise as every_pair

SCALES = {
    "plain": {"scaled": False},
    "of blocks": {"block_scales": True},
    "of all keys": {"uniform_keys": True, "uniform_values": True, "seed": 1},
}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_blackwell(), reason="needs a GPU of sm_100 or sm_103"),
]


@every_pair(lengths=list(LENGTHS), mask=list(MASKS), scales=SCALES, widths=list(WIDTHS))
def test_masks(lengths, mask, scales, widths):
    kv_lens, q_lens = LENGTHS[lengths]
    given = {"kv_lens": kv_lens, "q_lens": q_lens, "transposed": False, **scales}
    case(widths, mask, **given).run("cuda", "blackwell")


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize(
    "fields",
    [
        {"sink": "mixed"},
        {"sharpness": -2.0},
        {"sharpness": 0.0},
        {"sharpness": 30.0},
        {"padded": True, "given_results": True},
        {"wide_indices": True, "heads": 7},
        {"mask": "null"},
    ],
    ids=str,
)
def test_other_arguments(fields, scales):
    given = {"kv_lens": (500, 0, 130), "q_lens": (200, 0, 130), "transposed": False}
    case(**{**given, **scales, **fields}).run("cuda", "blackwell")


@pytest.mark.parametrize("mask", ["causal", "null", "a window of several blocks"])
@pytest.mark.parametrize("widths", WIDTHS)
def test_many_tiles_of_a_cta(widths, mask):
    lengths = (1, 64, 65, 0, 128, 200, 0, 127, 193, 700) * 4
    contexts = (1, 100, 65, 0, 1000, 333, 77, 127, 321, 700) * 4
    given = {"kv_lens": contexts, "q_lens": lengths, "heads": 16, "block_scales": True}
    case(widths, mask, transposed=False, **given).run("cuda", "blackwell")
