"""Which prefill problems Blackwell's kernel takes, and how it is launched: host logic, no GPU."""

from __future__ import annotations

import pytest
import torch

from mlakit import mla_prefill
from mlakit.dispatch import selection
from mlakit.dispatch.specs import Problem, Use, pretending
from mlakit.kernels.blackwell import support
from mlakit.kernels.blackwell.device.configs import SMEM_BYTES
from mlakit.kernels.blackwell.prefill.configs import (
    ACC_COLUMNS,
    KEYS,
    OTHER_SMEM_BYTES,
    PART,
    QUERIES,
    TAIL,
    WIDTHS,
    prefill_config,
)
from mlakit.model.masks import KINDS
from tests.kernels.blackwell.test_sparse_dispatch import Launched


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    """A Triton that can compile the kernel, whichever is installed."""
    monkeypatch.setattr(support, "version", lambda package: "3.9.0")


def problem(**fields: object) -> Problem:
    given = {"dtype": "torch.bfloat16", "heads": 16, "head_widths": (128, 64, 128)}
    return Problem("cuda", **{"arch": 100, "mask": "causal", **given, **fields})


@pytest.mark.parametrize("arch", [100, 103])
@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("mask", [kind for kind, known in KINDS.items() if not known.IS_COMPRESSED])
def test_problems_that_it_takes(mask, widths, dtype, arch):
    asked = problem(mask=mask, head_widths=widths, dtype=dtype, arch=arch)
    assert selection.select("mla_prefill", asked, "blackwell").name == "blackwell"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"arch": 90}, "needs sm_100 or sm_103, got sm_90"),
        ({"arch": 120}, "needs sm_100 or sm_103, got sm_120"),
        (
            {"dtype": "torch.float32"},
            "needs torch.bfloat16, torch.float16 or torch.float8_e4m3fn, got torch.float32",
        ),
        (
            {"head_widths": (64, 32, 64)},
            "needs widths D_N+D_R+D_V of 128+64+128, 192+64+256 or 128+0+128, got 64+32+64",
        ),
        ({"head_widths": None}, "needs widths D_N+D_R+D_V of"),
        ({"mask": "compressed_causal"}, "needs a mask of null or causal or sliding_window_causal"),
        ({"uses": (Use.ALIBI_SLOPES,)}, "takes no alibi_slopes"),
        ({"uses": (Use.UNALIGNED_VALUES,)}, "takes no unaligned rows of v"),
    ],
    ids=str,
)
def test_reasons(fields, reason):
    asked = problem(**fields)
    assert selection.explain("mla_prefill", asked)["blackwell"].startswith(reason)


def test_it_needs_a_proof():
    (spec,) = (spec for spec in selection.specs("mla_prefill") if spec.name == "blackwell")
    assert spec.variant(problem()) == "bfloat16 192/128, causal"
    assert spec.variant(problem(head_widths=(192, 64, 256))) == "bfloat16 256/256, causal"
    assert selection.select("mla_prefill", problem()).backend == "triton"


@pytest.mark.parametrize(
    ("widths", "tiles", "stages"),
    [((128, 64, 128), 2, 3), ((192, 64, 256), 1, 5), ((128, 0, 128), 2, 5)],
)
def test_a_config_fits_an_sm(widths, tiles, stages):
    config = prefill_config(widths)
    assert tiles == config.TILES
    assert stages == config.STAGES
    d_n, d_r, d_v = widths
    assert tiles * d_v == ACC_COLUMNS
    elements = tiles * QUERIES * (d_n + d_r) + stages * KEYS * PART
    if (d_n + d_r) % PART:
        elements += 2 * KEYS * TAIL
        assert stages == 3  # the loads of the tail rely on the order of its stages
    assert 2 * elements + OTHER_SMEM_BYTES <= SMEM_BYTES
    # a producer, an issuing warp and two masking warps are a warpgroup
    others = (tiles - 1) * config.SOFTMAX_REGISTERS + config.OTHER_REGISTERS
    assert (tiles + 1) * config.MAX_REGISTERS - others >= 208
    assert (tiles + 1) * 128 * config.MAX_REGISTERS <= 65536


@pytest.fixture
def launched(monkeypatch):
    pytest.importorskip("triton", minversion="3.9", reason="Blackwell's kernels need Triton 3.9")
    from mlakit.kernels.blackwell.prefill import launch
    from mlakit.kernels.hopper.prefill import schedule
    from mlakit.kernels.launch import SHARED_BYTES, Target

    launches = Launched()
    for module in (launch, schedule):
        monkeypatch.setattr(module, "launch", launches)
        sm_100 = Target(100, 148, SHARED_BYTES[100])
        monkeypatch.setattr(module, "target", lambda device, sm_100=sm_100: sm_100)
    with pretending(100, 148):
        yield launches


def call(
    tokens: int, keys: int, heads: int = 3, widths: tuple[int, int, int] = WIDTHS[0]
) -> tuple[torch.Tensor, torch.Tensor]:
    d_n, d_r, d_v = widths
    q, k_nope = torch.zeros(tokens, heads, d_n + d_r), torch.zeros(keys, heads, d_n)
    given = (q, k_nope, torch.zeros(keys, d_r), torch.zeros(keys, heads, d_v))
    starts = (torch.tensor([0, each], dtype=torch.int32) for each in (tokens, keys))
    return mla_prefill(
        *(each.bfloat16() for each in given), *starts, softmax_scale=0.1, backend="blackwell"
    )


@pytest.mark.parametrize(
    ("widths", "queries", "grid"), [(WIDTHS[0], 256, 9), (WIDTHS[1], 128, 15), (WIDTHS[2], 256, 9)]
)
def test_a_launch(launched, widths, queries, grid):
    call(515, 600, widths=widths)
    (_, _, schedule), (_, launched_grid, arguments) = launched
    assert schedule["BLOCK_Q"] == queries
    assert launched_grid == (grid,)
    assert (arguments["k_rope"] is None) == (widths[1] == 0)
    for name in ("q", "k", "v"):
        assert list(arguments[name].block_shape) == [128, 64]
    assert arguments["maxnreg"] == arguments["CONFIG"].MAX_REGISTERS


@pytest.mark.parametrize(("tokens", "heads"), [(0, 3), (4, 0)])
def test_without_queries_no_kernel_is_started(launched, tokens, heads):
    out, _ = call(tokens, 7, heads)
    assert out.shape == (tokens, heads, 128)
    assert launched == []


def test_without_keys_results_are_empty(launched):
    out, lse = call(4, 0)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert launched == []
