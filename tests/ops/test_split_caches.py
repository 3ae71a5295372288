"""Ops over rows whose latent and rotated columns are two tensors: the oracle, joined rows."""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache
from mlakit.dispatch import selection
from mlakit.dispatch.specs import Problem, Use
from mlakit.formats import SPLIT_FORMATS
from mlakit.model.geometry import RowShape
from mlakit.ops import mla_decode, sparse_mla
from mlakit.tools.testing import assert_same_bits
from mlakit.tools.workloads import AppendCase, AppendRowsCase, DecodeCase, SparseCase

every_format = pytest.mark.parametrize("format", SPLIT_FORMATS)
each_backend = pytest.mark.parametrize("backend", ["cpu", "triton"])
FLOATS = {"bf16_split": "bf16", "fp16_split": "fp16", "fp32_split": "fp32"}


@pytest.fixture(autouse=True)
def _own_device(request, device):
    backend = (
        request.node.callspec.params.get("backend") if hasattr(request.node, "callspec") else None
    )
    if backend == "cpu" and device.type != "cpu":
        pytest.skip("the CPU kernels take CPU tensors only")


def rows(format: str, **more: object) -> dict:
    """The part of a case that says how its rows are stored, and the dtype of its queries."""
    scaled = {"tensor_scale": 0.4} if format == "fp8_split" else {}
    return {"format": format, "dtype": FLOATS.get(format, "bf16"), **scaled, **more}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"padded": True, "num_layers": 2, "page_size": 7},
        {"flat_table": True, "padded": True},
        {"num_splits": 3, "kv_lens": (150, 65)},
        {"kv_lens": (1400, 700, 0), "q_lens": (1, 1, 0), "page_size": 64},
        {"sink": "finite", "q_scaled": True, "dtype": "e4m3"},
        {"mask": "sliding_window_causal", "window": 9, "page_size": 1},
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "heads": 20, "page_size": 64},
        {"kv_lora_rank": 36, "qk_rope_head_dim": 6, "v_width": 20},
    ],
    ids=" ".join,
)
@every_format
@each_backend
def test_decode(format, more, backend, device):
    case = {"heads": 3, "kv_lens": (37, 5), "q_lens": (1, 2), "page_size": 16, **rows(format)}
    DecodeCase(**{**case, **more}).run(device, backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"padded": True, "num_layers": 2, "page_size": 7},
        {"num_splits": 2, "topk": 70},
        {"extra_format": "same", "padded": True},
        {"extra_format": "joined", "with_lens": False},
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "heads": 20, "page_size": 64, "topk": 130},
    ],
    ids=" ".join,
)
@every_format
@each_backend
def test_sparse(format, more, backend, device):
    extra = {"same": format, "joined": format.removesuffix("_split")}.get(more.get("extra_format"))
    more = more if extra is None else {**more, "extra_format": extra}
    SparseCase(**{"heads": 3, **rows(format), **more}).run(device, backend)


@pytest.mark.slow
@every_format
@each_backend
def test_an_extra_cache_may_be_split_where_the_first_is_joined(format, backend, device):
    case = {**rows(format), "format": format.removesuffix("_split"), "extra_format": format}
    SparseCase(heads=3, **case).run(device, backend)


@pytest.mark.parametrize("padded", [False, True])
@every_format
@each_backend
def test_append_rows(format, padded, backend, device):
    case = {"num_tokens": 9, "page_size": 4, "num_layers": 2, "padded": padded}
    AppendRowsCase(**rows(format, **case)).run(device, backend)


@pytest.mark.parametrize("rope", ["interleaved", "half"])
@every_format
@each_backend
def test_norm_rope_quant_append(format, rope, backend, device):
    case = {"heads": 2, "kv_lens": (7, 20), "q_lens": (3, 1), "rope": rope, "padded": True}
    AppendCase(**rows(format, **case)).run(device, backend)


def both(format: str, device: str) -> tuple[PagedLatentCache, PagedLatentCache]:
    """The same rows, split and joined."""
    pools = [
        PagedLatentCache.allocate(RowShape(64, 16), name, num_pages=8, page_size=16, device=device)
        for name in (format, format.removesuffix("_split"))
    ]
    rows = torch.randn(128, 80, generator=torch.Generator().manual_seed(0)).to(device)
    for pool in pools:
        pool.layer(0).write(torch.arange(128, device=device), rows)
    return pools[0], pools[1]


@every_format
@each_backend
def test_results_are_those_of_joined_rows_bit_by_bit(format, backend, device):
    pools = split, _ = both(format, device)
    slots = torch.arange(128, device=device)
    assert_same_bits("rows", *(pool.layer(0).read(slots) for pool in pools))
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(3, 4, 80, generator=generator).to(device)
    q = q if format == "fp8_split" else q.to(split.payload.dtype)
    table = torch.randperm(8, generator=generator)[:6].view(3, 2).int().to(device)
    lens = torch.tensor([32, 5, 20], device=device).int()
    listed = torch.randint(-1, 128, (3, 40), generator=generator).int().to(device)
    for results in (
        [mla_decode(q, pool, table, lens, softmax_scale=0.1, backend=backend) for pool in pools],
        [sparse_mla(q, pool, listed, softmax_scale=0.1, backend=backend) for pool in pools],
    ):
        for got, want in zip(*results, strict=True):
            assert_same_bits("result", got, want)


SIXTEEN_BIT = ("m64_bf16", "small_m_bf16")
OPS = ("mla_decode", "sparse_mla", "append_rows", "norm_rope_quant_append", "indexer_logits")
TAKEN = {
    **{("cpu", op): SPLIT_FORMATS for op in OPS},
    **{("triton", op): SPLIT_FORMATS for op in OPS if op != "indexer_logits"},
    **{(f"hopper:{name}", "mla_decode"): ("bf16_split", "fp16_split") for name in SIXTEEN_BIT},
    **{
        (f"hopper:{name}", "mla_decode"): ("fp8_split",)
        for name in ("m64_fp8_qk", "m64_fp8_kv", "small_m_fp8_kv")
    },
    ("hopper:m64_bf16", "sparse_mla"): ("bf16_split", "fp16_split"),
    ("hopper:m64_fp8_kv", "sparse_mla"): ("fp8_split",),
}


@every_format
@pytest.mark.parametrize(
    "spec",
    [spec for spec in selection.SPECS if ("cpu", spec.op) in TAKEN],
    ids=lambda spec: f"{spec.name}-{spec.op}",
)
def test_other_kernels_refuse_them_with_a_reason(spec, format):
    """A kernel for joined rows would read rotated columns where other rows lie."""
    device = {"cpu": ("cpu", 0)}.get(spec.backend, ("cuda", 90))
    dtype = "torch.bfloat16" if format == "fp8_split" else f"torch.{str_of(format)}"
    if spec.kernel == "m64_fp8_qk":
        dtype = "torch.float8_e4m3fn"
    problem = Problem(*device, dtype, format, 16, 64, RowShape(512, 64))
    reason = spec.why_not(problem)
    if format in TAKEN.get((spec.name, spec.op), ()):
        assert reason is None
    else:
        assert reason is not None


def str_of(format: str) -> str:
    return {"bf16_split": "bfloat16", "fp16_split": "float16", "fp32_split": "float32"}[format]


@pytest.mark.parametrize("spec", selection.specs("sparse_mla"), ids=lambda spec: spec.name)
@pytest.mark.parametrize("uses", [(), (Use.OTHER_EXTRA_FORMAT,)], ids=["both", "extra"])
def test_hopper_refuses_a_split_extra_cache(uses, spec):
    device = {"cpu": ("cpu", 0)}.get(spec.backend, ("cuda", 90))
    format = "bf16" if uses else "bf16_split"
    uses = (*uses, Use.SPLIT_EXTRA)
    problem = Problem(*device, "torch.bfloat16", format, 16, 64, RowShape(512, 64), uses=uses)
    assert (spec.why_not(problem) is None) == (spec.backend in ("cpu", "triton"))
