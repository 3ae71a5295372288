"""Hopper's FP8 prefill kernel, compared with the oracle on poisoned inputs."""

from __future__ import annotations

from random import Random

import pytest
import torch

from mlakit import launch_cache, mla_prefill
from mlakit.dispatch import selection
from mlakit.dispatch.specs import Problem, Use
from mlakit.formats import SCALE_BLOCK
from mlakit.kernels.hopper.prefill.configs import FP8_BLOCK_K, fp8_prefill_config
from mlakit.kernels.hopper.prefill.fp8_values import BLOCK
from mlakit.tools.testing import assert_same_bits
from mlakit.tools.workloads import PrefillFp8Case
from tests.kernels.hopper.test_prefill import LENGTHS as BF16_LENGTHS
from tests.kernels.hopper.test_prefill import MASKS
from tests.pairs import pairwise

LENGTHS = {  # kv_lens, q_lens; a tile is 192 queries, of which a warpgroup has 64
    **BF16_LENGTHS,
    "an fp8 tile less one, a tile, a tile and one": ((191, 192, 193), (191, 192, 193)),
    "warpgroups without queries": ((64, 300, 128, 193), (64, 65, 128, 129)),
    "blocks that some warpgroups do not see": ((576, 700), (576, 450)),
}

WIDTHS = {"192/128": (128, 64, 128), "128/128": (128, 0, 128)}  # D_N, D_R, D_V
SCALES = {"plain": {"scaled": False}, "scaled": {}, "scales of blocks": {"block_scales": True}}


def case(widths: str = "192/128", mask: str = "causal", **fields: object) -> PrefillFp8Case:
    nope, rope, value = WIDTHS[widths]
    given = {
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "mask": MASKS[mask].kind,
        "window": MASKS[mask].window,
        "heads": 2,
    }
    return PrefillFp8Case(**{**given, **fields})


@pytest.mark.gpu
@pairwise(lengths=list(LENGTHS), mask=list(MASKS), scales=SCALES)
def test_masks(lengths, mask, scales):
    """Requests begin at any key, tiles of rewritten values at multiples of 128 of each request."""
    kv_lens, q_lens = LENGTHS[lengths]
    case(mask=mask, kv_lens=kv_lens, q_lens=q_lens, **scales).run("cuda", "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fields",
    [
        {"widths": "128/128"},
        {"widths": "128/128", "mask": "null", "scaled": False},
        {"transposed": False},
        {"block_scales": True},
        {"block_scales": True, "seed": 1, "transposed": False, "padded": True},
        {"block_scales": True, "sharpness": -2.0},
        {"block_scales": True, "sharpness": 30.0},
        {"block_scales": True, "widths": "128/128", "sink": "mixed"},
        {"uniform_keys": True},
        {"uniform_keys": True, "seed": 1},
        {"uniform_values": True},
        {"uniform_keys": True, "uniform_values": True},
        {
            "uniform_keys": True,
            "uniform_values": True,
            "seed": 1,
            "mask": "a window of several blocks",
        },
        {"sink": "finite"},
        {"sink": "mixed"},
        {"sharpness": -2.0},
        {"sharpness": 30.0},
        {"padded": True},
        {"padded": True, "given_results": True},
        {"wide_indices": True},
        {"heads": 1},
        {"heads": 7},
    ],
    ids=str,
)
def test_other_arguments(fields):
    case(kv_lens=(500, 0, 130), q_lens=(200, 0, 130), **fields).run("cuda", "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [1, 2, 15, 17, 130, 143, 144, 1000, 1025])
@pytest.mark.parametrize("mask", ["causal", "null"])
def test_keys_that_are_not_whole_groups(mask, keys):
    """P's registers and the rewritten values have keys in another order in each group of 16."""
    case(mask=mask, kv_lens=(keys,), q_lens=(keys,)).run("cuda", "hopper")
    case(mask=mask, kv_lens=(77, keys), q_lens=(77, 150)).run("cuda", "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "null"])
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES.keys())
def test_sums_of_many_blocks(mask, scales):
    """Tensor cores would lose 1 % over so many keys: their sums are promoted to float32."""
    case(mask=mask, kv_lens=(5000,), q_lens=(130,), **scales).run("cuda", "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "null", "a window of several blocks"])
@pytest.mark.parametrize("num_sms", [1, 3, 20])
@pytest.mark.usefixtures("no_replay")
def test_many_tiles_per_cta(num_sms, mask, monkeypatch):
    """Stages wrap, and the number of blocks of a tile is odd and even."""
    from dataclasses import replace

    from mlakit.kernels.hopper.prefill import fp8_launch

    real = fp8_launch.target
    monkeypatch.setattr(fp8_launch, "target", lambda device: replace(real(device), num_sms=num_sms))
    lengths = (1, 64, 65, 0, 128, 200, 0, 127, 193, 700)
    contexts = (1, 100, 65, 0, 1000, 333, 77, 127, 321, 700)
    case(mask=mask, kv_lens=contexts, q_lens=lengths, heads=3).run("cuda", "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed):
    draw = Random(seed)
    q_lens = tuple(draw.choice([0, 1, draw.randrange(400)]) for _ in range(draw.choice([1, 4, 30])))
    kv_lens = tuple(max(0, q_len + draw.choice([0, -3, draw.randrange(300)])) for q_len in q_lens)
    mask = draw.choice(list(MASKS))
    heads, block_scales = draw.choice([1, 2, 5]), draw.choice([False, True])
    lengths = {"kv_lens": kv_lens, "q_lens": q_lens}
    case(mask=mask, seed=seed, heads=heads, block_scales=block_scales, **lengths).run(
        "cuda", "hopper"
    )


@pytest.mark.gpu
def test_repeated_calls_are_replayed_with_the_same_bits():
    own = torch.Generator("cuda").manual_seed(0)
    shapes = ((600, 4, 192), (600, 4, 128), (600, 64))
    q, k_nope, k_rope = (
        torch.randn(shape, generator=own, device="cuda").to(torch.float8_e4m3fn) for shape in shapes
    )
    v = torch.randn(4, 128, 608, generator=own, device="cuda").to(torch.float8_e4m3fn)
    v = v.permute(2, 0, 1)[:600]
    v_scale = torch.rand(600, 4, generator=own, device="cuda") + 0.1
    starts = torch.tensor([0, 250, 600], dtype=torch.int32, device="cuda")

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return mla_prefill(
            *(q, k_nope, k_rope, v, starts, starts),
            softmax_scale=0.1,
            v_scale=v_scale,
            backend="hopper",
        )

    launch_cache.reset_stats()
    first = call()
    for _ in range(20):
        results = call()
        assert_same_bits("out", results[0], first[0])
        assert_same_bits("lse", results[1], first[1])
    assert launch_cache.stats()["mla_prefill"].hits >= 2


def problem(**fields: object) -> Problem:
    given = {"dtype": "torch.float8_e4m3fn", "heads": 2, "head_widths": (128, 64, 128)}
    return Problem("cuda", 90, **{**given, **fields})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"head_widths": (128, 0, 128)}, None),
        (
            {"head_widths": (192, 64, 256)},
            "needs widths D_N+D_R+D_V of 128+64+128, 128+0+128, got 192+64+256",
        ),
        ({"uses": (Use.ALIBI_SLOPES,)}, "takes no alibi_slopes"),
    ],
    ids=str,
)
def test_what_the_kernel_takes(fields, reason):
    assert selection.explain("mla_prefill", problem(**fields))["hopper"] == reason


def test_a_block_of_keys_is_a_tile_of_values_and_has_one_scale():
    """What loads scales, values and keys of a block has one number for it."""
    assert set(FP8_BLOCK_K.values()) == {BLOCK}
    assert BLOCK == SCALE_BLOCK


@pytest.mark.parametrize("widths", FP8_BLOCK_K)
def test_registers_of_all_warps_fit_an_sm(widths):
    """Three consumer warpgroups, and four warps of which one is the producer."""
    config = fp8_prefill_config(widths)
    consumers = config.BLOCK_Q // 64
    given = (consumers + 1) * config.MAX_REGISTERS - config.PRODUCER_REGISTERS
    assert given >= consumers * config.CONSUMER_REGISTERS
    assert (consumers + 1) * 128 * config.MAX_REGISTERS <= 65536
