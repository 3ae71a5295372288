"""The oracles of what is appended: rotation, norm, and both rounded step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from mlakit import reference
from tests.reference.inputs import E4M3, assert_same, normal


def rope_table(positions: int, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    inverse = 100.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
    return torch.stack([angles.cos(), angles.sin()], -1).flatten(1).to(dtype)


def test_rotation_is_a_complex_product() -> None:
    x, cos_sin = normal(4, 3, 8, seed=1), rope_table(7, 8)[6]
    exact = torch.view_as_complex(x.view(4, 3, 4, 2)) * torch.view_as_complex(cos_sin.view(4, 2))
    assert_same(reference.rotate(x, cos_sin), torch.view_as_real(exact).flatten(-2))


def test_finished_rows_are_stored_at_their_slots() -> None:
    latent, k_rope = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0], [20.0], [30.0]])
    before = torch.full((4, 2), torch.nan)
    after = reference.append_rows(latent, k_rope, before, [3, -1, 0])
    expected = torch.tensor([[3, 30], [torch.nan] * 2, [torch.nan] * 2, [1, 10]]).double()
    torch.testing.assert_close(after, expected, rtol=0, atol=0, equal_nan=True)
    assert before.isnan().all()
    keys = reference.append_rows(latent, None, torch.zeros(2, 1), [1, 0, -1])
    assert keys.tolist() == [[2.0], [1.0]]


def test_half_is_interleaved_with_the_columns_permuted() -> None:
    x, cos_sin = normal(5, 8, seed=1), rope_table(7, 8)[6]
    to_half = [0, 2, 4, 6, 1, 3, 5, 7]
    interleaved = reference.rotate(x, cos_sin, rope="interleaved")
    assert_same(reference.rotate(x[:, to_half], cos_sin, rope="half"), interleaved[:, to_half])
    assert (reference.rotate(x, cos_sin, rope="half") - interleaved).abs().max() > 0.1
    bf16, table = x.bfloat16(), cos_sin.bfloat16()
    stepwise = reference.rotate_stepwise(bf16, table)
    half = reference.rotate_stepwise(bf16[:, to_half], table, rope="half")
    assert torch.equal(half, stepwise[:, to_half])


@pytest.mark.parametrize("rotate", [reference.rotate, reference.rotate_stepwise])
def test_unknown_rope_is_refused(rotate: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match='rope must be "interleaved" or "half", got \'neox\''):
        rotate(torch.zeros(4), torch.zeros(4), rope="neox")


ULP = 2.0**-7  # of a bf16 number between 1 and 2


@pytest.mark.parametrize(
    ("x", "cos_sin", "y"),
    [
        # x1·sin = 1 + 4 ulp + 3·2^-14 is rounded before it is taken from 1;
        # x0·sin + x1·cos = 2 + 4 ulp
        ((1, 1 + ULP), (1, 1 + 3 * ULP), (-4 * ULP, 2 + 4 * ULP)),
        # the same product as x0·cos is not rounded: 4 ulp + 3·2^-14 rounds to 4 ulp · (1 + ulp);
        # x0·sin + x1·cos = 2 + 4 ulp
        ((1 + ULP, 1), (1 + 3 * ULP, 1), (4 * ULP * (1 + ULP), 2 + 4 * ULP)),
        # x0·cos = 259/256 is half way between two bf16 numbers and would go up, but something is
        # taken away, too little for float32 or for float64 to show; x0·sin + x1·cos is 1829 units
        # of the last digit of x1·cos, and 1829 needs three bits more than bf16 has
        ((7, 2.0**-15), (37 / 256, 2.0**-15), (1 + ULP, 1832 * 2.0**-23)),
        ((7, 2.0**-40), (37 / 256, 2.0**-40), (1 + ULP, 1832 * 2.0**-48)),
    ],
    ids=["product rounded", "fused product exact", "beyond float32", "beyond float64"],
)
def test_stepwise_rotation_by_hand(
    x: tuple[float, float], cos_sin: tuple[float, float], y: tuple[float, float]
) -> None:
    rotated = reference.rotate_stepwise(
        torch.tensor(x, dtype=torch.bfloat16), torch.tensor(cos_sin, dtype=torch.bfloat16)
    )
    assert rotated.dtype == torch.bfloat16
    assert rotated.tolist() == list(y)


def nearest(value: Fraction, dtype: torch.dtype) -> Fraction:
    """`value` rounded to a number of `dtype`, ties to even, in exact arithmetic."""
    info = torch.finfo(dtype)
    binade = max(Fraction(2) ** (math.frexp(value)[1] - 1), Fraction(info.smallest_normal))
    unit = binade * Fraction(info.eps)
    return round(value / unit) * unit  # round() of a Fraction goes to even on a tie


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "freq_dtype", "octaves"),
    [
        (torch.bfloat16, torch.bfloat16, 40),
        (torch.bfloat16, torch.float32, 40),
        (torch.float32, torch.float32, 40),
        (torch.float16, torch.float16, 3),
    ],
)
def test_stepwise_rotation_is_exact_to_the_bit(
    dtype: torch.dtype, freq_dtype: torch.dtype, octaves: int
) -> None:
    """Against exact fractions; sizes differ so much that sums lose digits, in float64 as well."""
    x = normal(300, 2, seed=1) * 2.0 ** (octaves * normal(300, 2, seed=2).clamp(-1, 1))
    for pair, cos_sin in zip(x.to(dtype), rope_table(300, 2, freq_dtype), strict=True):
        x0, x1 = map(Fraction, pair.to(freq_dtype).tolist())
        c, s = map(Fraction, cos_sin.tolist())
        y0 = nearest(x0 * c - nearest(x1 * s, freq_dtype), freq_dtype)
        y1 = nearest(x0 * s + nearest(x1 * c, freq_dtype), freq_dtype)
        exact = [float(nearest(y, dtype)) for y in (y0, y1)]
        assert reference.rotate_stepwise(pair, cos_sin).tolist() == exact


@pytest.mark.slow
def test_stepwise_rotation_stays_close_to_the_exact_one() -> None:
    """Half an ulp (2^-8 relative) for the rounded product, and half an ulp for the sum."""
    x, table = normal(200, 64, seed=1).bfloat16(), rope_table(200, 64, torch.bfloat16)
    for row, cos_sin in zip(x, table, strict=True):
        exact = reference.rotate(row, cos_sin)
        error = (reference.rotate_stepwise(row, cos_sin).double() - exact).abs()
        sin_cos = torch.stack([cos_sin[1::2], cos_sin[0::2]], -1).flatten()
        product = (row[1::2].repeat_interleave(2).double() * sin_cos.double()).abs()
        assert (error <= 2.0**-8 * (product + exact.abs() + 2.0**-8 * product)).all()
        assert error.max() > 0 or torch.equal(cos_sin[1::2], torch.zeros(32).bfloat16())


def test_stepwise_norm_by_hand() -> None:
    # mean(x²) + epsilon = 12.5 + 3.5 = 4²; 3/4 · (1 + ulp) is half way and goes to the even side
    x, gamma = torch.tensor([3.0, 4.0]).bfloat16(), torch.tensor([1 + ULP, 1 + ULP]).bfloat16()
    y = reference.rms_norm_stepwise(x, gamma, 3.5)
    assert y.dtype == torch.bfloat16
    assert y.tolist() == [0.75 + 2 * 2.0**-8, 1 + ULP]


def test_stepwise_norm_rounds_before_gamma() -> None:
    # x is not a bf16 number and its norm is 1: rounded to 1 + ulp first, then 1.5 · (1 + ulp) is
    # half way and goes up; 1.5 · x itself would go down
    x = torch.tensor([1 + 0.75 * ULP, 0.0])
    epsilon = 1 - (1 + 0.75 * ULP) ** 2 / 2
    gamma = torch.tensor([1.5, 1.0])
    assert reference.rms_norm_stepwise(x, gamma.bfloat16(), epsilon)[0] == 1.5 + 2 * ULP
    assert reference.rms_norm(x, gamma, epsilon)[0].bfloat16() == 1.5 + ULP
    in_float32 = reference.rms_norm_stepwise(x, gamma, epsilon)
    assert in_float32.dtype == torch.float32
    assert_same(in_float32, reference.rms_norm(x, gamma, epsilon), 1e-6)


def test_stepwise_norm_stays_close_to_the_exact_one() -> None:
    """Two roundings to bf16, half an ulp (2^-8 relative) each; the float32 part is far smaller."""
    x, gamma = normal(50, 512, seed=1).bfloat16(), normal(512, seed=2).bfloat16()
    exact = reference.rms_norm(x, gamma, 1e-6)
    error = (reference.rms_norm_stepwise(x, gamma, 1e-6).double() - exact).abs()
    assert (error <= 2.01 * 2.0**-8 * exact.abs()).all()
    assert error.max() > 0


def test_norm_matches_torch() -> None:
    x, gamma = normal(5, 16, seed=1), normal(16, seed=2)
    exact = torch.nn.functional.rms_norm(x, (16,), gamma, eps=0.5)
    assert_same(reference.rms_norm(x, gamma, 0.5), exact)


def test_norm_rope_quant_takes_each_token_at_its_position() -> None:
    positions = [4, 0, 4, 7]
    q_rope, kv = normal(4, 3, 4, seed=1), normal(4, 10, seed=2)
    freqs, gamma = rope_table(9, 4), normal(6, seed=3)
    freqs[[position for position in range(9) if position not in positions]] = torch.nan
    q_out, rows = reference.norm_rope_quant(q_rope, kv, freqs, gamma, positions, epsilon=0.1)
    for token, position in enumerate(positions):
        turn = torch.view_as_complex(freqs[position].view(2, 2))
        turned = torch.view_as_complex(q_rope[token].view(3, 2, 2)) * turn
        assert_same(q_out[token], torch.view_as_real(turned).flatten(1))
        key = torch.view_as_complex(kv[token, 6:].view(2, 2).contiguous()) * turn
        latent = torch.nn.functional.rms_norm(kv[token, :6], (6,), gamma, eps=0.1)
        assert_same(rows[token], torch.cat([latent, torch.view_as_real(key).flatten()]))


def test_new_tokens_are_the_newest_of_their_request() -> None:
    assert reference.append_positions((7, 2, 4, 0), (3, 2, 0, 0)) == [4, 5, 6, 0, 1]


def test_a_token_at_no_position_has_no_query_and_no_row() -> None:
    q_rope, kv, freqs = normal(4, 2, 6, seed=1), normal(4, 10, seed=2), rope_table(3, 6)
    positions = [2, -1, 3, 0]
    exact = reference.norm_rope_quant(q_rope, kv, freqs, torch.ones(4), positions, epsilon=1e-6)
    stepwise = reference.norm_rope_quant_stepwise(
        q_rope.bfloat16(),
        kv.bfloat16(),
        freqs.float(),
        torch.ones(4),
        positions,
        epsilon=1e-6,
        out_dtype=torch.bfloat16,
        cache_dtype=torch.float32,
    )
    for queries, rows in (exact, stepwise):
        assert (queries[1:3] == 0).all()
        assert (queries[[0, 3]] != 0).any(-1).all()
        assert rows[1:3].isnan().all()
        assert rows[[0, 3]].isfinite().all()


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_stepwise_rows_are_the_steps_in_the_final_dtypes(cache_dtype: torch.dtype) -> None:
    positions = [4, 0, 7]
    q_rope, kv = normal(3, 2, 4, seed=1).bfloat16(), normal(3, 10, seed=2).bfloat16()
    freqs, gamma = rope_table(9, 4, torch.float32), normal(6, seed=3).bfloat16()
    for rope in ("interleaved", "half"):
        q_out, rows = reference.norm_rope_quant_stepwise(
            q_rope,
            kv,
            freqs,
            gamma,
            positions,
            epsilon=0.1,
            rope=rope,
            out_dtype=E4M3,
            cache_dtype=cache_dtype,
        )
        assert (q_out.dtype, rows.dtype) == (E4M3, cache_dtype)
        for token, position in enumerate(positions):
            q = reference.rotate_stepwise(q_rope[token], freqs[position], rope=rope)
            key = reference.rotate_stepwise(kv[token, 6:], freqs[position], rope=rope)
            latent = reference.rms_norm_stepwise(kv[token, :6], gamma, 0.1)
            row = torch.cat([latent, key]).to(cache_dtype)
            assert torch.equal(q_out[token].float(), q.to(E4M3).float())
            assert torch.equal(rows[token].float(), row.float())


def test_stepwise_e4m3_results_saturate() -> None:
    q_rope = torch.tensor([[[1e4, -1e4]]]).bfloat16()
    kv = torch.tensor([[1.0, 1.0, -1e4, 1e4]]).bfloat16()
    freqs, gamma = torch.tensor([[1.0, 0.0]]), torch.tensor([1e4, 1.0])
    q_out, rows = reference.norm_rope_quant_stepwise(
        q_rope, kv, freqs, gamma, [0], epsilon=0.0, out_dtype=E4M3, cache_dtype=E4M3
    )
    assert q_out.float().tolist() == [[[448.0, -448.0]]]
    assert rows.float().tolist() == [[448.0, 1.0, -448.0, 448.0]]


def test_norm_without_rope_columns() -> None:
    kv, gamma = normal(3, 6, seed=1), normal(6, seed=2)
    nothing = torch.empty(3, 2, 0)
    q_out, rows = reference.norm_rope_quant(
        nothing, kv, torch.empty(9, 0), gamma, [0, 1, 2], epsilon=0.1
    )
    assert q_out.shape == (3, 2, 0)
    assert_same(rows, torch.nn.functional.rms_norm(kv, (6,), gamma, eps=0.1))
