"""Appending and decoding rows of e4m3 with scales per row or per group of columns beside them."""

from __future__ import annotations

import pytest

from mlakit.dispatch import selection
from mlakit.dispatch.specs import Problem
from mlakit.formats import GROUP_FORMATS
from mlakit.model.geometry import RowShape
from mlakit.tools.workloads import AppendCase, AppendRowsCase, DecodeCase
from tests.pairs import pairwise

every_format = pytest.mark.parametrize("format", GROUP_FORMATS)
each_backend = pytest.mark.parametrize("backend", ["cpu", "triton"])
ROWS = {f"{rank}-{rope}": (rank, rope) for rank, rope in ((512, 64), (128, 96), (256, 8), (128, 0))}


@pytest.fixture(autouse=True)
def _own_device(backend, device):
    if backend == "cpu" and device.type != "cpu":
        pytest.skip("the CPU kernels take CPU tensors only")


def row(format: str, kv_lora_rank: int = 128, qk_rope_head_dim: int = 96) -> dict:
    widths = {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    return {"format": format, "page_size": 16, **widths}


@pytest.mark.slow
@pairwise(format=GROUP_FORMATS, widths=ROWS, dtype=["bf16", "fp16", "fp32", "e4m3"])
@each_backend
def test_decode(format, widths, dtype, backend, device):
    DecodeCase(heads=3, dtype=dtype, kv_lens=(37, 5), q_lens=(1, 2), **row(format, *widths)).run(
        device, backend
    )


@pytest.mark.slow
@pytest.mark.parametrize("format", ["fp8_row", "fp8_group64"])
@pytest.mark.parametrize(
    "more",
    [
        {"flat_table": True},
        {"num_splits": 3, "kv_lens": (150, 65)},
        {"sink": "finite", "q_scaled": True, "num_layers": 2},
        {"dtype": "e4m3", "q_rope_dtype": "bf16"},
        {"dtype": "fp16", "q_rope_dtype": "bf16"},
        {"page_size": 7, "mask": "sliding_window_causal", "window": 9},
        {"heads": 40, "page_size": 64},
    ],
    ids="-".join,
)
@each_backend
def test_decode_options(format, more, backend, device):
    case = {"heads": 2, "dtype": "bf16", "kv_lens": (37, 5), "q_lens": (1, 2), **row(format)}
    DecodeCase(**{**case, **more}).run(device, backend)


@pairwise(
    format=GROUP_FORMATS,
    widths=ROWS,
    rope=["interleaved", "half"],
    power_of_two={"any": False, "pow2": True},
)
@each_backend
def test_append(format, widths, rope, power_of_two, backend, device):
    AppendCase(
        heads=2,
        kv_lens=(7, 20),
        q_lens=(3, 1),
        rope=rope,
        power_of_two=power_of_two,
        **row(format, *widths),
    ).run(device, backend)


@pairwise(format=GROUP_FORMATS, widths=ROWS)
@each_backend
def test_append_rows(format, widths, backend, device):
    AppendRowsCase(num_tokens=9, padded=True, **row(format, *widths)).run(device, backend)


@every_format
@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize("op", ["sparse_mla", "indexer_logits"])
def test_ops_that_take_no_such_rows_say_so(format, op, backend):
    problem = Problem("cuda", 90, "torch.bfloat16", format, 16, 64, RowShape(512, 64))
    (spec,) = (each for each in selection.specs(op) if each.backend == backend)
    assert spec.why_not(problem) == (
        "needs rows of bf16 or fp16 or fp32 or fp8 or fp8_token or fp8_block128 or fp8_block64 "
        f"or mxfp4_block32, got {format}"
    )
