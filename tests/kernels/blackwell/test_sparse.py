"""Blackwell's sparse kernels on a GPU, compared with the oracle on poisoned caches: run on a B200.

No GPU of this kind has run it yet; `mlakit check --backend blackwell` runs its configurations.
"""

from __future__ import annotations

import pytest
import torch

from mlakit.kernels.blackwell.support import ARCHS
from mlakit.tools.workloads import SparseCase

ROW = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def is_blackwell() -> bool:
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor in ARCHS


KERNELS = ("m128_bf16", "n64_bf16")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("kernel", KERNELS),
    pytest.mark.skipif(not is_blackwell(), reason="needs a GPU of sm_100 or sm_103"),
]


def run(kernel: str, **fields: object) -> None:
    given = {**ROW, "page_size": 64, "num_pages": 6, "heads": 128, "topk": 200, **fields}
    SparseCase(**given).run("cuda", f"blackwell:{kernel}")


@pytest.mark.parametrize("heads", [1, 64, 128])
@pytest.mark.parametrize("topk", [1, 64, 1000])
def test_fp8_rows(kernel, heads, topk):
    if kernel == KERNELS[0]:
        run("n64_fp8_kv", heads=heads, topk=topk, format="fp8_block128", sink="finite")


@pytest.mark.parametrize("heads", [1, 16, 17, 64, 65, 128, 200])
def test_heads(kernel, heads):
    run(kernel, heads=heads, num_tokens=3, topk=150, sink="finite")


@pytest.mark.parametrize("topk", [1, 63, 64, 65, 128, 129, 1000, 2048])
@pytest.mark.parametrize("with_lens", [True, False])
def test_list_lengths(kernel, topk, with_lens):
    run(kernel, topk=topk, with_lens=with_lens, num_tokens=4)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 32])
@pytest.mark.parametrize("with_extra", [False, True])
def test_splits(kernel, num_splits, with_extra):
    extra = {"extra_format": "bf16", "extra_topk": 130} if with_extra else {}
    run(kernel, num_splits=num_splits, topk=900, heads=70, sink="mixed", **extra)


@pytest.mark.parametrize("num_tokens", [1, 148, 400])
def test_more_tiles_than_sms(kernel, num_tokens):
    run(kernel, num_tokens=num_tokens, topk=300, num_splits=1)
