"""Which prefill problems Hopper's kernel takes, and what it says of the others."""

from __future__ import annotations

import pytest
import torch

from mlakit import mla_prefill
from mlakit.dispatch import proofs, selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.specs import Problem, Use, pretending
from mlakit.kernels.hopper.prefill.configs import (
    BLOCK_K,
    BLOCK_Q,
    UNPROVED_WIDTHS,
    prefill_config,
)
from mlakit.model.masks import KINDS
from mlakit.ops.prefill import _has_pitch
from mlakit.tools.workloads import PrefillCase

WIDTHS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

NO_TMA = ": no TMA descriptor can address them"


def problem(**fields: object) -> Problem:
    given = {"dtype": "torch.bfloat16", "heads": 16, "head_widths": (128, 64, 128)}
    return Problem("cuda", 90, **{**given, "mask": "causal", **fields})


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
@pytest.mark.parametrize("widths", [each for each in BLOCK_K if each not in UNPROVED_WIDTHS])
@pytest.mark.parametrize("mask", [kind for kind, known in KINDS.items() if not known.IS_COMPRESSED])
def test_hopper_is_the_first_choice(mask, widths, dtype):
    asked = problem(mask=mask, head_widths=widths, dtype=dtype)
    assert selection.select("mla_prefill", asked).name == "hopper"


@pytest.mark.parametrize("widths", UNPROVED_WIDTHS)
def test_widths_that_no_gpu_has_run_wait_for_a_check(widths):
    asked = problem(head_widths=widths)
    assert selection.select("mla_prefill", asked).backend == "triton"
    name = "mla_prefill: " + "+".join(map(str, widths))
    reason = selection.explain("mla_prefill", asked)["hopper"]
    assert reason is not None
    assert "mlakit check --backend hopper enables it" in reason
    spec = selection.select("mla_prefill", asked, "hopper")
    assert (spec.backend, proofs.configuration(spec, asked)) == ("hopper", name)
    fp8 = problem(head_widths=widths, dtype="torch.float8_e4m3fn")
    assert "needs widths" in str(selection.explain("mla_prefill", fp8)["hopper"])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"dtype": "torch.float32"},
            "needs torch.bfloat16 or torch.float16 or torch.float8_e4m3fn, got torch.float32",
        ),
        (
            {"head_widths": (128, 64, 64)},
            "needs widths D_N+D_R+D_V of 128+64+128, 192+64+256, 128+0+128, 64+32+64, 256+0+256, "
            "64+64+128, got 128+64+64",
        ),
        ({"uses": (Use.ALIBI_SLOPES,)}, "takes no alibi_slopes"),
        (
            {"uses": (Use.UNALIGNED_QUERY, Use.UNALIGNED_KEYS)},
            "takes no unaligned rows of q" + NO_TMA,
        ),
        ({"uses": (Use.UNALIGNED_KEYS,)}, "takes no unaligned rows of k_nope or k_rope" + NO_TMA),
        ({"uses": (Use.UNALIGNED_VALUES,)}, "takes no unaligned rows of v" + NO_TMA),
    ],
    ids=str,
)
def test_problems_that_are_left_to_the_portable_kernel(fields, reason):
    asked = problem(**fields)
    assert selection.explain("mla_prefill", asked)["hopper"] == reason
    assert selection.select("mla_prefill", asked).backend == "triton"


def test_the_kernel_needs_sm_90():
    for where, got in ((("cuda", 100), "sm_100"), (("cuda", 80), "sm_80"), (("cpu", 0), "cpu")):
        asked = Problem(*where, dtype="torch.bfloat16", head_widths=(128, 64, 128))
        assert selection.explain("mla_prefill", asked)["hopper"] == f"needs sm_90, got {got}"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"alibi": True}, "takes no alibi_slopes"),
        (
            {"dtype": "fp32"},
            "needs torch.bfloat16 or torch.float16 or torch.float8_e4m3fn, got torch.float32",
        ),
        ({"v_head_dim": 64}, "got 128\\+64\\+64"),
    ],
    ids=str,
)
def test_calls_that_are_left_to_the_portable_kernel(fields, words):
    trial = PrefillCase(**{**WIDTHS, **fields}).trial("cpu")
    with pretending(90), pytest.raises(UnsupportedError, match=words):
        trial.call("hopper")


@pytest.mark.parametrize("name", ["q", "k_nope", "k_rope", "v"])
def test_tensors_that_tma_cannot_address_are_refused_by_name(name):
    tensors = {
        "q": torch.zeros(9, 2, 192, dtype=torch.bfloat16),
        "k_nope": torch.zeros(9, 2, 128, dtype=torch.bfloat16),
        "k_rope": torch.zeros(9, 64, dtype=torch.bfloat16),
        "v": torch.zeros(9, 2, 128, dtype=torch.bfloat16),
    }
    whole = tensors[name]
    odd = torch.zeros(whole.numel() + 1, dtype=torch.bfloat16)[1:].view(whole.shape)
    tensors[name] = odd  # begins at an odd multiple of 2 bytes
    starts = torch.tensor([0, 9], dtype=torch.int32)
    words = "k_nope or k_rope" if name.startswith("k") else name
    with (
        pretending(90),
        pytest.raises(UnsupportedError, match=f"takes no unaligned rows of {words}"),
    ):
        mla_prefill(*tensors.values(), starts, starts, softmax_scale=1.0, backend="hopper")


def test_rows_of_one_pitch():
    rows = torch.zeros(6, 4, 64, dtype=torch.bfloat16)
    assert _has_pitch(rows)
    assert _has_pitch(rows[..., :32])
    assert _has_pitch(rows[:, 1:3])
    assert _has_pitch(rows[::2])
    assert _has_pitch(rows[:0])
    assert _has_pitch(rows[:1, :, :9])  # the distance to a row that is not there
    assert _has_pitch(torch.zeros(6, 64, dtype=torch.bfloat16))
    assert not _has_pitch(rows[..., 1:])  # not at 16 bytes
    assert not _has_pitch(rows.transpose(0, 1))  # rows of several tokens between those of one
    assert not _has_pitch(rows[:1].expand(6, 4, 64))
    assert not _has_pitch(torch.zeros(6, 1, 9, dtype=torch.bfloat16))


@pytest.mark.parametrize("gap", [1, 2, 4, 6])
def test_heads_that_do_not_begin_at_16_bytes(gap):
    """Rows begin at multiples of 16 bytes, the second head does not: TMA faults at its column."""
    heads = torch.zeros(6, 8, 64 + gap, dtype=torch.bfloat16)[..., :64]
    assert heads.stride(0) * 2 % 16 == 0
    assert not _has_pitch(heads)
    assert not _has_pitch(heads[:1])
    assert _has_pitch(heads[:, :1])  # no head begins at the stride
    assert _has_pitch(torch.zeros(6, 8, 72, dtype=torch.bfloat16)[..., :64])


@pytest.mark.parametrize("requests", [0, 2])
def test_without_queries_no_kernel_is_started(requests):
    from mlakit.kernels.launch import SHARED_BYTES, Target, compiling

    starts = torch.zeros(requests + 1, dtype=torch.int32)
    q, k_nope = torch.empty(0, 2, 192), torch.empty(0, 2, 128)
    tensors = [each.to(torch.bfloat16) for each in (q, k_nope, torch.empty(0, 64), k_nope)]
    with compiling(Target(90, 132, SHARED_BYTES[90])) as compilation:
        out, lse = mla_prefill(*tensors, starts, starts, softmax_scale=1.0, backend="hopper")
    assert (out.shape, lse.shape) == ((0, 2, 128), (0, 2))
    assert compilation.kernels == []


def test_without_keys_results_are_empty():
    """TMA has no tile of no rows."""
    from mlakit.kernels.launch import SHARED_BYTES, Target, compiling

    case = PrefillCase(**WIDTHS, kv_lens=(0, 0), q_lens=(3, 1))
    trial = case.trial("cpu")
    with compiling(Target(90, 132, SHARED_BYTES[90])) as compilation:
        trial.check(trial.call("hopper"))
    assert compilation.kernels == []


@pytest.mark.parametrize("widths", BLOCK_K)
def test_registers_of_all_warps_fit_an_sm(widths):
    """Two consumer warpgroups, and four warps of which three are a producer and masking warps."""
    config = prefill_config(widths)
    both = 3 * config.MAX_REGISTERS - config.PRODUCER_REGISTERS
    assert both >= 2 * config.CONSUMER_REGISTERS
    assert 3 * 128 * config.MAX_REGISTERS <= 65536
    assert BLOCK_Q % config.BLOCK_K == 0
