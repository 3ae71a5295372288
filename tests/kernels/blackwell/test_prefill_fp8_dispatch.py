"""Which problems Blackwell's FP8 prefill kernel takes, and how it is launched: no GPU."""

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
    FP8_WIDTHS,
    KEYS,
    OTHER_SMEM_BYTES,
    PART,
    QUERIES,
    TAIL,
    fp8_prefill_config,
)
from mlakit.tools.compile.configurations import BLACKWELL
from mlakit.tools.workloads import PrefillFp8Case
from mlakit.tools.workloads.random_launches import selection_of
from tests.kernels.blackwell.test_prefill_dispatch import launched as launched_prefill
from tests.kernels.blackwell.test_prefill_dispatch import triton as pretended_triton

launched, triton = launched_prefill, pretended_triton


def problem(**fields: object) -> Problem:
    given = {"dtype": support.E4M3, "heads": 16, "head_widths": (128, 64, 128), "mask": "causal"}
    return Problem("cuda", **{"arch": 100, **given, **fields})


def taken(backend: str, **fields: object) -> str | None:
    return selection.explain("mla_prefill", problem(**fields))[backend]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"arch": 90}, "needs sm_100 or sm_103, got sm_90"),
        (
            {"head_widths": (192, 64, 256)},
            "needs widths D_N+D_R+D_V of 128+64+128 or 128+0+128, got 192+64+256",
        ),
        ({"uses": (Use.ALIBI_SLOPES,)}, "takes no alibi_slopes"),
        ({"uses": (Use.CONTIGUOUS_KEYS,)}, "takes no v with contiguous keys instead of columns"),
        ({"uses": (Use.SCALES_OF_KEYS,)}, "takes no scales of each key"),
        ({"uses": (Use.UNALIGNED_VALUES,)}, "takes no unaligned rows of v: no TMA descriptor"),
    ],
    ids=str,
)
def test_reasons(fields, reason):
    assert str(taken("blackwell", **fields)).startswith(reason)


@pytest.mark.parametrize("widths", FP8_WIDTHS)
def test_it_needs_a_proof_that_a_configuration_gives(widths):
    (spec,) = (spec for spec in selection.specs("mla_prefill") if spec.name == "blackwell")
    # `prove` derives the other masks from these
    asked = problem(head_widths=widths, mask="causal" if widths[1] else "null")
    assert spec.why_not(asked) is None
    variants = set()
    for case in BLACKWELL.values():
        if isinstance(case, PrefillFp8Case):
            with pretending(100, 148):
                selected = selection_of(case, "cpu", "blackwell")
            assert selected is not None
            variants.add(spec.variant(selected[1]))
    assert spec.variant(asked) in variants
    assert selection.select("mla_prefill", asked).backend == "triton"


@pytest.mark.parametrize("use", [Use.CONTIGUOUS_KEYS, Use.SCALES_OF_KEYS, Use.UNALIGNED_VALUES])
def test_hopper_rewrites_what_this_kernel_refuses(use):
    assert taken("hopper", arch=90, uses=(use,)) is None
    assert taken("hopper", arch=90, uses=(use,), dtype="torch.bfloat16") is not None


@pytest.mark.parametrize("widths", FP8_WIDTHS)
def test_a_config_fits_an_sm(widths):
    config, (d_n, d_r, d_v) = fp8_prefill_config(widths), widths
    assert (config.TILES, config.TILES * d_v) == (2, ACC_COLUMNS)
    # keys have one part and values one, so the stages of a block are those of block − AHEAD
    assert (d_n, d_v, 2 * config.AHEAD) == (PART, PART, config.STAGES)
    assert config.AHEAD & (config.AHEAD - 1) == 0
    tails = config.AHEAD * KEYS * TAIL if d_r else 0
    used = config.TILES * QUERIES * (d_n + d_r) + config.STAGES * KEYS * PART + tails
    assert used + OTHER_SMEM_BYTES <= SMEM_BYTES


def call(scales: dict[str, object], widths: tuple[int, int, int] = FP8_WIDTHS[0], keys: int = 600):
    d_n, d_r, d_v = widths
    q, k_nope = torch.zeros(515, 3, d_n + d_r), torch.zeros(keys, 3, d_n)
    given = (q, k_nope, torch.zeros(keys, d_r), torch.zeros(keys, 3, d_v))
    starts = (torch.tensor([0, each], dtype=torch.int32) for each in (515, keys))
    return mla_prefill(
        *(each.to(torch.float8_e4m3fn) for each in given),
        *starts,
        softmax_scale=0.1,
        backend="blackwell",
        **scales,
    )


@pytest.mark.parametrize("widths", FP8_WIDTHS)
def test_a_launch(launched, widths):
    blocks = 600 // 128 + 1
    scales = {"k_scale": torch.ones(blocks), "v_scale": torch.ones(blocks, 3)}
    call({**scales, "keys_per_scale": 128}, widths)
    (_, _, schedule), (kernel, grid, arguments) = launched
    assert kernel.fn.__name__ == "mla_prefill_e4m3_kernel"
    assert (schedule["BLOCK_Q"], grid) == (256, (9,))
    for name in ("q", "k", "v"):
        assert list(arguments[name].block_shape) == [128, 128]
    for name in ("q_rope", "k_rope"):
        tail = arguments[name]
        assert (None if tail is None else list(tail.block_shape)) == (
            [128, 64] if widths[1] else None
        )
    assert arguments["scales"][3:] == (0, 0, 1, 3, 1)


def test_one_scale_of_all_keys_has_a_stride_of_0(launched):
    scales = {"k_scale": torch.ones(1).expand(600), "v_scale": torch.ones(1, 3).expand(600, 3)}
    call(scales)
    assert launched[1][2]["scales"][3:] == (0, 0, 0, 0, 1)


def test_without_keys_results_are_empty(launched):
    out, lse = call({}, keys=0)
    assert out.dtype == torch.bfloat16
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert launched == []
