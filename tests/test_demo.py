"""`mlakit demo` passes as it is, and fails as soon as any kernel it runs is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import process_time

import pytest
import torch
from typer.testing import CliRunner

from mlakit import cli, demo, dispatch
from mlakit.compat import modular
from mlakit.masks import NULL
from mlakit.specs import Problem

APPENDS = {"fused_rope_rmsnorm_quantization_kernel", "mla_fused_rope_rmsnorm_quantization"}
PREFILL = {"mla_prefill_branch_fp8"}
DECODE = {"flare_mla_decoding"}
SPARSE = {"mla_sm100_prefill_sparse"}
DOCUMENTED = APPENDS | PREFILL | DECODE | SPARSE


def run_command() -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["demo"])
    return result.exit_code, result.output


def last_line(output: str) -> str:
    """The last sentence, which may be wrapped over lines."""
    return " ".join(output.rstrip().splitlines()).rpartition("FAIL: ")[2]


def test_demo_passes_and_says_so():
    start = process_time()
    exit_code, output = run_command()
    assert exit_code == 0, output
    assert process_time() - start < 15
    assert "PASS: 6 of 6 checks within budget" in output
    assert "FAIL" not in output
    assert "WRONG" not in output
    for function in DOCUMENTED:
        assert function in output
        assert callable(getattr(modular, function))
    for size in ("81920", "1152", "576", "644", "656"):  # 81920 = 128 · (192 + 128) · 2
        assert size in output.split()


def does_nothing(right: Callable, *args, **kwargs):
    """Outputs keep what they held."""


def ignores_the_newest_key(right, *args, **kwargs):
    *before, kv_lens = args
    right(*before, kv_lens - 1, **kwargs)


def shifts_the_pages(right, *args, **kwargs):
    q_latent, q_rope, q_scale, layer, page_table, *lengths = args
    right(q_latent, q_rope, q_scale, layer, (page_table + 1) % demo.NUM_PAGES, *lengths, **kwargs)


def spoils_one_number(value: float) -> Callable:
    def wrong(right, *args, out, **kwargs):
        right(*args, out=out, **kwargs)
        out[7, 3, 100] = value

    return wrong


def with_options(**changed: object) -> Callable:
    return lambda right, *args, **kwargs: right(*args, **{**kwargs, **changed})


def with_scale_off(right, *args, softmax_scale, **kwargs):
    right(*args, softmax_scale=1.1 * softmax_scale, **kwargs)


def without_gamma(right, *args, **kwargs):
    q_rope, kv, freqs, gamma, *where = args
    right(q_rope, kv, freqs, torch.ones_like(gamma), *where, **kwargs)


def one_position_late(right, *args, **kwargs):
    q_rope, kv, freqs, *where = args
    right(q_rope, kv, freqs.roll(1, 0), *where, **kwargs)


def without_weight_scales(right, a, a_scale, b, b_scale, **kwargs):
    right(a, a_scale, b, torch.full_like(b_scale, float(b_scale.mean())), **kwargs)


FAULTS = {
    "decode-does-nothing": ("mla_decode", does_nothing, DECODE),
    "decode-newest-key": ("mla_decode", ignores_the_newest_key, DECODE),
    "decode-pages": ("mla_decode", shifts_the_pages, DECODE),
    "decode-scale": ("mla_decode", with_scale_off, DECODE),
    "decode-one-number": ("mla_decode", spoils_one_number(1.0), DECODE),
    "decode-one-nan": ("mla_decode", spoils_one_number(torch.nan), DECODE),
    "sparse-does-nothing": ("sparse_mla", does_nothing, SPARSE),
    "sparse-sink": ("sparse_mla", with_options(sink=None), SPARSE),
    "append-does-nothing": ("norm_rope_quant_append", does_nothing, APPENDS | PREFILL),
    "append-rope": ("norm_rope_quant_append", with_options(rope="half"), APPENDS | PREFILL),
    "append-gamma": ("norm_rope_quant_append", without_gamma, APPENDS | PREFILL),
    "append-position": ("norm_rope_quant_append", one_position_late, APPENDS | PREFILL),
    "prefill-does-nothing": ("mla_prefill", does_nothing, PREFILL),
    "prefill-mask": ("mla_prefill", with_options(mask=NULL), PREFILL),
    "prefill-weight-scales": ("scaled_mm_fp8", without_weight_scales, PREFILL),
    "prefill-quantiser": ("quantize_fp8", with_options(scale_ub=2.0), PREFILL),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_fails_the_demo(fault, monkeypatch):
    op, wrong, culprits = FAULTS[fault]
    spec = dispatch.select(op, Problem("cpu"))
    right = spec.launch
    # the dictionary is where cached_property keeps the launcher
    monkeypatch.setitem(spec.__dict__, "launch", partial(wrong, right))
    exit_code, output = run_command()
    assert exit_code == 1, output
    assert "PASS" not in output
    assert "WRONG" in output
    named = set(last_line(output).replace(",", " ").split())
    # a wrong append leaves NaN or other rows for those that follow
    assert culprits <= named <= DOCUMENTED
    if op != "norm_rope_quant_append":
        assert named == culprits
