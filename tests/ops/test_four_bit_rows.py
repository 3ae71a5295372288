"""Four-bit rows of DeepSeek-V4, 368 bytes, and four-bit index keys, 68 bytes, in every op."""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache
from mlakit.dispatch import selection
from mlakit.dispatch.specs import Problem
from mlakit.model.geometry import RowShape
from mlakit.ops import append_rows, indexer_select
from mlakit.tools.workloads import (
    AppendCase,
    AppendRowsCase,
    CompressCase,
    DecodeCase,
    IndexerLogitsCase,
    IndexerSelectCase,
    SparseCase,
)

FORMAT = "mxfp4_block32"
V4 = {"format": FORMAT, "kv_lora_rank": 448, "qk_rope_head_dim": 64, "v_width": 512}
KEYS = {"format": FORMAT, "kv_lora_rank": 128, "qk_rope_head_dim": 0, "page_size": 16}
REQUESTS = {"kv_lens": (65, 0, 40), "q_lens": (1, 1, 3)}
each_backend = pytest.mark.parametrize("backend", ["cpu", "triton"])


@pytest.fixture(autouse=True)
def _own_device(request, device):
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    if parameters.get("backend") == "cpu" and device.type != "cpu":
        pytest.skip("the CPU kernels take CPU tensors only")


@pytest.mark.slow
@pytest.mark.parametrize("row", [V4, KEYS], ids=["rows", "keys"])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["any", "pow2"])
@each_backend
def test_append(row, power_of_two, backend, device):
    options = {"power_of_two": power_of_two, "heads": 2, "padded": True}
    AppendCase(**row, kv_lens=(65, 7, 40), q_lens=(1, 0, 3), **options).run(device, backend)
    AppendRowsCase(**row, num_tokens=30, padded=True, num_layers=2).run(device, backend)


@pytest.mark.slow
@pytest.mark.parametrize("row", [V4, {**KEYS, "angles": 64}], ids=["rows", "keys"])
@each_backend
def test_compress(row, backend, device):
    CompressCase(**row, kv_lens=(40, 9), q_lens=(12, 4), padded=True).run(device, backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"page_size": 64, "num_layers": 2, "padded": True},
        {"page_size": 1, "flat_table": True, "sink": "mixed"},
        {"page_size": 7, "num_splits": 3},
        {"page_size": 16, "heads": 40, "mask": "sliding_window_causal", "window": 9},
        {"page_size": 64, "dtype": "e4m3", "q_scaled": True},
        {"page_size": 64, "sharpness": -2.0, "q_rope_dtype": "bf16"},
    ],
    ids=" ".join,
)
@each_backend
def test_decode(more, backend, device):
    DecodeCase(**V4, **{"heads": 5, **REQUESTS, **more}).run(device, backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"page_size": 64, "num_layers": 2, "padded": True},
        {"page_size": 7, "num_splits": 3, "sink": "mixed"},
        {"page_size": 64, "extra_format": FORMAT, "extra_page_size": 2, "extra_topk": 40},
        {"page_size": 16, "extra_format": "bf16", "extra_topk": 9, "heads": 70},
        {"page_size": 64, "dtype": "e4m3", "q_scaled": True},
    ],
    ids=" ".join,
)
@each_backend
def test_sparse(more, backend, device):
    SparseCase(**V4, **{"heads": 5, "topk": 70, "num_tokens": 3, **more}).run(device, backend)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize(
    "more",
    [{"padded": True, "num_layers": 2}, {"flat_table": True}, {"page_size": 7, "mask": "null"}],
    ids=" ".join,
)
@each_backend
def test_scores_and_selections_of_keys(more, dtype, backend, device):
    case = {**KEYS, **REQUESTS, "heads": 8, "dtype": dtype, **more}
    IndexerLogitsCase(**case).run(device, backend)
    IndexerSelectCase(**case, k=20, power_of_two=True).run(device, backend)


@pytest.mark.slow
@each_backend
def test_a_key_is_found_among_others(backend, device):
    """A query selects the key that equals it, although both are rounded to four bits."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(100, 128, generator=generator).to(device)
    row = RowShape(128, 0)
    cache = PagedLatentCache.allocate(row, FORMAT, num_pages=2, page_size=64, device=device)
    assert cache.payload.shape[-1] == 68
    slots = torch.arange(100, device=device)
    append_rows(keys, keys[:, :0], cache, slots, backend=backend)
    found = indexer_select(
        keys[90:, None].bfloat16(),
        torch.ones(10, 1, device=device),
        cache,
        torch.tensor([[0, 1]], dtype=torch.int32, device=device),
        torch.tensor([100], dtype=torch.int32, device=device),
        1,
        q_starts=torch.tensor([0, 10], dtype=torch.int32, device=device),
        backend=backend,
    )
    assert found.flatten().tolist() == list(range(90, 100))


@pytest.mark.parametrize(
    ("op", "row", "dtype", "reason"),
    [
        (
            "indexer_logits",
            RowShape(128, 0),
            "torch.float8_e4m3fn",
            f"needs keys of fp8_token, got {FORMAT}",
        ),
        (
            "sparse_mla",
            RowShape(448, 64, v_width=512),
            "torch.bfloat16",
            f"needs rows of bf16 or fp16, got {FORMAT}",
        ),
    ],
)
def test_hopper_leaves_them_to_the_portable_kernels(op, row, dtype, reason):
    problem = Problem("cuda", 90, dtype, FORMAT, 64, 64, row, mask="causal")
    assert selection.explain(op, problem)["hopper"] == reason
    assert selection.select(op, problem, "auto").backend == "triton"
