"""Blackwell's decode kernels on a GPU, compared with the oracle on poisoned caches: run on a B200.

No GPU of this kind has run it yet; `mlakit check --backend blackwell` runs its configurations.
"""

from __future__ import annotations

import pytest

from mlakit.tools.workloads import DecodeCase
from tests.kernels.blackwell.test_sparse import is_blackwell
from tests.kernels.hopper.decode_cases import LENGTHS, MANY_TILES, around_pages, random_batch

ROW = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_blackwell(), reason="needs a GPU of sm_100 or sm_103"),
]


def run(**fields: object) -> None:
    given = {**ROW, "page_size": 64, "heads": 128, **fields}
    DecodeCase(**given).run("cuda", "blackwell")


@pytest.mark.parametrize("format", ["bf16", "fp8_block128"])
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize(("kv_lens", "q_lens"), LENGTHS.values(), ids=LENGTHS.keys())
def test_lengths(kv_lens, q_lens, heads, format):
    run(kv_lens=kv_lens, q_lens=q_lens, heads=heads, format=format)


@pytest.mark.parametrize("heads", [1, 16, 17, 33, 64, 65, 128, 200])
def test_heads(heads):
    run(kv_lens=(300, 64, 1), q_lens=(2, 1, 1), heads=heads, sink="finite")


@pytest.mark.parametrize("format", ["bf16", "fp8_block128"])
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 64, 96, 1024])
def test_pages(page_size, format):
    run(**around_pages(page_size), format=format)


@pytest.mark.parametrize("format", ["fp16", "bf16_split"])
def test_other_rows(format):
    run(kv_lens=(300, 64, 1), format=format, dtype=format.removesuffix("_split"))


@pytest.mark.parametrize("batch", [7, 150])
def test_random_batches(batch):
    run(**random_batch(batch), heads=64)


def test_many_tiles_of_a_cta():
    run(**MANY_TILES, q_lens=(1,) * 10)
