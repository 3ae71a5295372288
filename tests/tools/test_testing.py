"""assert_matches takes correct results and rejects wrong ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mlakit.tools.testing import (
    NEVER_A_PAGE,
    assert_matches,
    assert_same_bits,
    assert_unchanged,
    poison,
    shuffled_pages,
    snapshot,
)

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
CASES = [(1, 512), (3, 64), (300, 128), (40, 1), (17, 8)]  # keys, columns of a value


def softmax_oracle(scores: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scores, v = scores.to(dtype), v.to(dtype)
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


def careful_kernel(scores: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a good kernel does: base 2, float32 statistics, probabilities rounded to `dtype`."""
    scaled = scores.float() * math.log2(math.e)
    peak = scaled.amax(-1, keepdim=True)
    probs = (scaled - peak).exp2()
    total = probs.sum(-1, keepdim=True)
    out = (probs.to(dtype).float() @ v.float()) / total
    return out.to(dtype), (peak + total.log2()) * math.log(2)


def attention(
    num_keys: int, columns: int, dtype: torch.dtype, generator: torch.Generator, rows: int = 200
) -> tuple[Tensor, Tensor]:
    scores = torch.randn(rows, num_keys, generator=generator) * 3
    v = torch.randn(num_keys, columns, generator=generator).to(dtype)
    return scores, v


def rounded_rows(
    dtype: torch.dtype, generator: torch.Generator, shape: tuple[int, ...] = (4, 16, 512)
) -> tuple[Tensor, Tensor]:
    """An exact result and a faithful one."""
    exact = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return exact, exact.to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("naive_dtype", [torch.float32, None], ids=["naive32", "naive-own"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_correct_kernel_never_fails_by_chance(case, dtype, naive_dtype):
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        scores, v = attention(*case, dtype, generator)
        exact, exact_lse = softmax_oracle(scores, v, torch.float64)
        naive, _ = softmax_oracle(scores, v, naive_dtype or dtype)
        _, naive_lse = softmax_oracle(scores, v, torch.float32)
        out, lse = careful_kernel(scores, v, dtype)
        assert_matches("out", out, exact, naive)
        assert_matches("lse", lse, exact_lse, naive_lse)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_exact_naive_run_leaves_a_kernel_its_rounding(dtype, generator):
    exact = torch.randn(64, 4, generator=generator).to(dtype).double()
    naive = exact.clone()  # every row hit exactly: no budget comes from here
    one_step_up = exact.to(dtype)
    one_step_up.view(torch.int32 if dtype.itemsize == 4 else torch.int16).add_(1)
    assert_matches("out", one_step_up, exact, naive)


def test_an_exact_naive_run_among_subnormal_numbers(generator):
    step = 2.0**-24
    exact = torch.randint(1, 9, (64, 4), generator=generator).double() * step
    assert_matches("out", (exact + step).half(), exact, exact)
    with pytest.raises(AssertionError):
        assert_matches("out", (exact + 2 * step).half(), exact, exact)


def zero(row: Tensor, other: Tensor) -> Tensor:
    return torch.zeros_like(row)


def swap(row: Tensor, other: Tensor) -> Tensor:
    return other


def scale_by_one_percent(row: Tensor, other: Tensor) -> Tensor:
    return row * 1.01


def negate(row: Tensor, other: Tensor) -> Tensor:
    return -row


def rotate_by_one(row: Tensor, other: Tensor) -> Tensor:
    return row.roll(1)


def one_element(row: Tensor, other: Tensor) -> Tensor:
    return torch.cat([row[:-1], row[-1:] + 0.1])


WRONG_ROWS = [zero, swap, scale_by_one_percent, negate, rotate_by_one, one_element]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [64, 128, 512])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("wrong_row", WRONG_ROWS, ids=lambda f: f.__name__)
def test_one_wrong_row_is_found_and_named(wrong_row, dtype, columns):
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        exact, actual = rounded_rows(dtype, generator, (4, 16, columns))
        naive = exact.float()
        assert_matches("out", actual, exact, naive)
        actual[2, 5] = wrong_row(exact[2, 5], exact[2, 6]).to(dtype)
        with pytest.raises(
            AssertionError, match=r"out: 1 of 64 rows are wrong, worst row \[2, 5\]"
        ):
            assert_matches("out", actual, exact, naive)


@pytest.mark.slow
@pytest.mark.parametrize("wrong_row", [zero, swap, scale_by_one_percent], ids=lambda f: f.__name__)
@pytest.mark.parametrize("num_keys", [17, 300])
def test_one_wrong_row_of_a_real_attention_is_found(wrong_row, num_keys, generator):
    scores, v = attention(num_keys, 512, torch.bfloat16, generator)
    exact, _ = softmax_oracle(scores, v, torch.float64)
    naive, _ = softmax_oracle(scores, v, torch.float32)
    out, _ = careful_kernel(scores, v, torch.bfloat16)
    assert_matches("out", out, exact, naive)
    out[100] = wrong_row(exact[100], exact[101]).to(out.dtype)
    with pytest.raises(AssertionError, match=r"worst row \[100\]"):
        assert_matches("out", out, exact, naive)


@pytest.mark.parametrize("columns", [64, 128, 512])
def test_no_row_scaled_by_one_percent_hides_in_the_rounding_of_its_largest_element(columns):
    exact, actual = rounded_rows(torch.bfloat16, torch.Generator().manual_seed(1), (500, columns))
    with pytest.raises(AssertionError, match="500 of 500 rows are wrong"):
        assert_matches("out", (exact * 1.01).bfloat16(), exact, actual)


def test_a_small_row_among_large_ones_has_its_own_budget(generator):
    exact, _ = rounded_rows(torch.bfloat16, generator, (64, 512))
    exact[7] *= 1e-3
    actual = exact.bfloat16()
    assert_matches("out", actual, exact, exact.bfloat16())
    actual[7] = 0
    with pytest.raises(AssertionError, match=r"row \[7\]"):
        assert_matches("out", actual, exact, exact.bfloat16())


def test_an_outlier_does_not_excuse_the_other_rows(generator):
    exact, _ = rounded_rows(torch.float32, generator, (64, 32))
    exact[0] *= 1e9
    actual = exact.float()
    actual[7] *= 1.01
    with pytest.raises(AssertionError, match=r"row \[7\]"):
        assert_matches("out", actual, exact, exact.float())


def test_a_row_of_zeros_must_be_exactly_zero(generator):
    exact, _ = rounded_rows(torch.float32, generator, (8, 16))
    exact[3] = 0
    actual = exact.float()
    assert_matches("out", actual, exact, exact.float())
    actual[3, 2] = 1e-30
    with pytest.raises(AssertionError, match=r"row \[3\]"):
        assert_matches("out", actual, exact, exact.float())


def test_tf32_is_not_float32(generator):
    q = torch.randn(64, 128, generator=generator)
    k = torch.randn(128, 128, generator=generator)

    def tf32(x: Tensor) -> Tensor:
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    exact = q.double() @ k.double()
    assert_matches("scores", q @ k, exact, q @ k)
    with pytest.raises(AssertionError):
        assert_matches("scores", tf32(q) @ tf32(k), exact, q @ k)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_patterns_of_nan_and_inf_must_equal_the_oracles(special, generator):
    exact, _ = rounded_rows(torch.float32, generator, (3, 5, 8))
    exact[1, 2, 3] = special
    naive = exact.float()
    assert_matches("lse", exact.float(), exact, naive)
    for wrong in (0.0, math.nan, math.inf, -math.inf):
        if wrong == special or (math.isnan(wrong) and math.isnan(special)):
            continue
        actual = exact.float()
        actual[1, 2, 3] = wrong
        with pytest.raises(AssertionError, match=r"lse: .* pattern .* row \[1, 2\] column 3"):
            assert_matches("lse", actual, exact, naive)
    actual = exact.float()
    actual[0, 0, 0] = special
    with pytest.raises(AssertionError, match=r"row \[0, 0\] column 0"):
        assert_matches("lse", actual, exact, naive)


def test_finite_numbers_beside_an_infinity_are_still_compared(generator):
    exact, _ = rounded_rows(torch.float32, generator, (6, 8))
    exact[:, 0] = -math.inf
    actual = exact.float()
    assert_matches("lse", actual, exact, actual)
    actual = actual.clone()
    actual[4, 1] += 0.01
    with pytest.raises(AssertionError, match=r"row \[4\]"):
        assert_matches("lse", actual, exact, exact.float())


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_naive_run_gives_no_budget(broken, generator):
    exact, actual = rounded_rows(torch.float32, generator, (3, 8))
    naive = actual.clone()
    naive[1, 1] = broken
    with pytest.raises(AssertionError, match="the naive run of out"):
        assert_matches("out", actual * 2, exact, naive)


def test_a_larger_factor_admits_more(generator):
    exact, actual = rounded_rows(torch.float32, generator, (3, 8))
    naive = actual * 1.001
    assert_matches("out", actual * 1.0018, exact, naive)
    with pytest.raises(AssertionError):
        assert_matches("out", actual * 1.004, exact, naive)
    assert_matches("out", actual * 1.004, exact, naive, factor=5.0)


def test_saturated_fp8_is_compared_by_its_distance():
    exact = torch.tensor([[500.0, 3.0]], dtype=torch.float64)
    saturated = torch.tensor([[448.0, 3.0]]).to(torch.float8_e4m3fn)
    assert_matches("rows", saturated, exact, saturated)


def test_what_the_type_cannot_hold_does_not_excuse_everything():
    exact = torch.tensor([[70000.0, 3.0]], dtype=torch.float64)
    saturated = torch.tensor([[65504.0, 3.0]], dtype=torch.float16)
    assert_matches("rows", saturated, exact, saturated)
    with pytest.raises(AssertionError, match="rows are wrong"):
        assert_matches("rows", -saturated, exact, saturated)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 4), (4, 0), (2, 3, 4, 5)])
def test_every_rank_is_taken(shape, generator):
    exact = torch.randn(shape, generator=generator, dtype=torch.float64)
    assert_matches("x", exact.float(), exact, exact.float())
    if exact.numel():
        with pytest.raises(AssertionError, match="rows are wrong"):
            assert_matches("x", exact.float() + 1, exact, exact.float())


@pytest.mark.parametrize("columns", [1, 512])
def test_a_gpu_is_waited_for_once(columns, generator):
    class Waits(TorchDispatchMode):
        """Counts the ops whose result the host has to know."""

        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            waiting = ("_local_scalar_dense", "nonzero", "masked_select", "equal.default")
            self.count += any(name in str(function) for name in waiting)
            return function(*args, **(kwargs or {}))

    exact = torch.randn(6, columns, generator=generator, dtype=torch.float64)
    exact[2] = 0
    with Waits() as waits:
        assert_matches("out", exact.bfloat16(), exact, exact.float())
    assert waits.count == 1


def test_shapes_and_kinds_are_checked():
    exact = torch.zeros(2, 3, dtype=torch.float64)
    good = exact.float()
    with pytest.raises(AssertionError, match=r"x: actual has shape \(3,\), the oracle \(2, 3\)"):
        assert_matches("x", torch.zeros(3), exact, good)
    with pytest.raises(AssertionError, match=r"x: naive has shape"):
        assert_matches("x", good, exact, torch.zeros(3))
    with pytest.raises(TypeError, match=r"actual must be floating, got torch\.int32"):
        assert_matches("x", good.int(), exact, good)
    with pytest.raises(TypeError, match="exact must be float64"):
        assert_matches("x", good, good, good)


def test_uninitialised_memory_is_poisoned():
    for dtype in (torch.float64, *FLOATS, torch.float8_e4m3fn):
        assert torch.empty(5, dtype=dtype).float().isnan().all()
        assert torch.zeros(1, dtype=dtype).new_empty(5).float().isnan().all()
        assert torch.empty_like(torch.zeros(5, dtype=dtype)).float().isnan().all()
    assert torch.empty(5, dtype=torch.uint8).tolist() == [0xFF] * 5
    assert torch.empty(5, dtype=torch.int32).tolist() == [NEVER_A_PAGE] * 5


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn], ids=str)
def test_poison_spares_only_the_kept_rows(dtype):
    tensor = torch.arange(24.0).reshape(2, 3, 4).to(dtype)
    keep = torch.tensor([[True, False, False], [False, False, True]])
    before = tensor.float()
    assert poison(tensor, keep) is tensor
    assert tensor.float().isnan().all(-1).equal(~keep)
    assert tensor.float()[keep].equal(before[keep])
    assert poison(tensor).float().isnan().all()


def test_poison_of_bytes_and_integers():
    keep = torch.tensor([True, False])
    assert poison(torch.zeros(2, 3, dtype=torch.uint8), keep).tolist() == [[0] * 3, [0xFF] * 3]
    for dtype in (torch.int32, torch.int64, torch.uint32):
        largest = torch.iinfo(dtype).max
        assert poison(torch.zeros(2, dtype=dtype), keep).tolist() == [0, largest]
    as_floats = poison(torch.zeros(4, dtype=torch.uint8))
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        assert as_floats.view(dtype).float().isnan().all()


def test_poison_of_a_view_leaves_its_base():
    base = torch.zeros(4, 6)
    poison(base[:, 2:4], torch.tensor([True, False, True, False]))
    assert base.isnan().nonzero().tolist() == [[1, 2], [1, 3], [3, 2], [3, 3]]


def test_poison_wants_a_mask_of_leading_axes():
    with pytest.raises(ValueError, match="poison: rows must be bool over the leading axes"):
        poison(torch.zeros(2, 3), torch.tensor([True]))
    with pytest.raises(ValueError, match=r"got torch\.int64"):
        poison(torch.zeros(2, 3), torch.tensor([0, 1]))


def test_shuffled_pages_are_distinct_and_in_the_pool(generator):
    table = shuffled_pages(4, 5, 32, generator)
    assert table.shape == (4, 5)
    assert table.dtype == torch.int32
    assert len(set(table.flatten().tolist())) == 20
    assert all(0 <= page < 32 for page in table.flatten().tolist())
    assert table.flatten().tolist() != sorted(table.flatten().tolist())
    again = shuffled_pages(4, 5, 32, torch.Generator().manual_seed(0))
    assert table.equal(again)


def test_shuffled_pages_of_ragged_requests(generator):
    table = shuffled_pages(3, [2, 0, 3], 5, generator)
    assert table.shape == (3, 3)
    assert (table == NEVER_A_PAGE).sum(-1).tolist() == [1, 3, 0]
    assert sorted(table.flatten().tolist())[:5] == [0, 1, 2, 3, 4]
    assert shuffled_pages(0, [], 5, generator).shape == (0, 0)


def test_shuffled_pages_refuses_what_the_pool_cannot_give(generator):
    with pytest.raises(ValueError, match="6 pages needed, the pool has 5"):
        shuffled_pages(2, 3, 5, generator)
    with pytest.raises(ValueError, match="1 page counts for a batch of 2"):
        shuffled_pages(2, [3], 5, generator)


def test_unchanged_is_a_matter_of_bits():
    cache = torch.full((2, 3, 4), math.nan)
    scales = torch.zeros(3)
    before = snapshot(cache=cache, scales=scales)
    assert_unchanged(before)
    cache[1, 2] = math.nan
    scales[1] = 0.0
    assert_unchanged(before)
    scales[1] = -0.0
    with pytest.raises(AssertionError, match=r"scales was written to: 1 of 1 rows differ"):
        assert_unchanged(before)
    scales[1] = 0.0
    cache.view(torch.int32)[1, 2, 3] += 1  # another NaN
    with pytest.raises(AssertionError, match=r"cache was written to: .* first row \[1, 2\]"):
        assert_unchanged(before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_unchanged_takes_every_type(dtype):
    tensor = torch.zeros(3, 4).to(dtype)
    before = snapshot(tensor=tensor, empty=tensor[:0], scalar=tensor[0, 0], strided=tensor[:, ::2])
    assert_unchanged(before)
    tensor.view(torch.uint8)[1, 2 * dtype.itemsize] = 1
    with pytest.raises(AssertionError, match=r"tensor was written to.* row \[1\]"):
        assert_unchanged(before)
    with pytest.raises(AssertionError, match=r"strided was written to.* row \[1\]"):
        assert_unchanged(before, written={"tensor": torch.tensor([False, True, False])})


def test_rows_that_may_be_written_are_spared_and_no_others():
    pool = torch.zeros(2, 3, 4)
    before = snapshot(pool=pool)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[1, 1] = True
    pool[1, 1] = 7
    assert_unchanged(before, written={"pool": mask})
    pool[0, 2, 3] = 7
    with pytest.raises(AssertionError, match=r"1 of 6 rows differ, first row \[0, 2\]"):
        assert_unchanged(before, written={"pool": mask})
    with pytest.raises(ValueError, match="the snapshot has no cache"):
        assert_unchanged(before, written={"cache": mask})


def test_same_bits_compares_type_and_shape_too():
    ones = torch.ones(2, 3)
    assert_same_bits("x", ones, ones.clone())
    with pytest.raises(AssertionError, match=r"x: got torch\.float32"):
        assert_same_bits("x", ones, ones.double())
    with pytest.raises(AssertionError, match=r"want torch.float32 \(3, 2\)"):
        assert_same_bits("x", ones, torch.ones(3, 2))
    with pytest.raises(AssertionError, match=r"x: 1 of 2 rows differ, first row \[1\]"):
        assert_same_bits("x", ones, torch.tensor([[1.0, 1, 1], [1, 1, 2]]))
