"""Every check fails with `<op>: <argument> must …, got …`, and passes what is right."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from mlakit.dispatch import knobs
from mlakit.dispatch.checks import (
    FLOATS,
    INTEGERS,
    Dims,
    UnsupportedError,
    as_signed,
    values_visible,
)


def raises(message: str, error: type[Exception] = ValueError):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


@pytest.fixture
def dims() -> Dims:
    return Dims("op", width=576)


def test_match_binds_axes_and_returns_the_tensor(dims):
    q = torch.zeros(3, 4, 576)
    assert dims.match("q", q, "tokens", "heads", "width", dtypes=FLOATS) is q
    assert (dims["tokens"], dims["heads"], dims["width"]) == (3, 4, 576)
    dims.match("lse", torch.zeros(3, 4), "tokens", "heads")


def test_match_names_both_arguments_that_disagree(dims):
    dims.match("q", torch.zeros(3, 4, 576), "tokens", "heads", "width")
    with raises("op: lse.shape[1] (heads) must equal q.shape[1], 4, got 5"):
        dims.match("lse", torch.zeros(3, 5), "tokens", "heads")


def test_match_holds_axes_to_the_sizes_of_the_call(dims):
    with raises("op: q.shape[1] (width) must equal width of the call, 576, got 512"):
        dims.match("q", torch.zeros(3, 512), "tokens", "width")


def test_match_holds_one_argument_to_itself(dims):
    with raises("op: square.shape[1] (n) must equal square.shape[0], 2, got 3"):
        dims.match("square", torch.zeros(2, 3), "n", "n")


def test_match_names_the_axes_of_a_wrong_rank(dims):
    with raises("op: q must have axes (tokens, heads, width), got shape (3, 576)"):
        dims.match("q", torch.zeros(3, 576), "tokens", "heads", "width")


def test_match_refuses_other_types(dims):
    with raises("op: kv_lens must be int32 or int64 or uint32, got float32", TypeError):
        dims.match("kv_lens", torch.zeros(3), "batch", dtypes=INTEGERS)
    with raises("op: kv_lens must be a tensor, got list", TypeError):
        dims.match("kv_lens", [1, 2], "batch")


def test_match_refuses_tensors_without_data_and_of_other_devices(dims):
    with raises("op: q must be on a device that holds data, got a meta tensor"):
        dims.match("q", torch.zeros(3, device="meta"), "tokens")


@pytest.mark.gpu
def test_match_names_the_argument_whose_device_counts(dims):
    dims.match("q", torch.zeros(3), "tokens")
    with raises("op: lse must be on the device of q, cpu, got cuda:0"):
        dims.match("lse", torch.zeros(3, device="cuda:0"), "tokens")


def test_bind_fixes_an_axis_and_reports_a_conflict(dims):
    dims.bind("page_size", 64, "page_size of the cache")
    with raises("op: k.shape[0] (page_size) must equal page_size of the cache, 64, got 16"):
        dims.match("k", torch.zeros(16), "page_size")
    dims.match("q", torch.zeros(3), "tokens")
    dims.bind("tokens", 3, "q_starts[-1]")
    with raises("op: q_starts[-1] must equal q.shape[0], 3, got 5"):
        dims.bind("tokens", 5, "q_starts[-1]")


def test_require_and_fail(dims):
    dims.require(True, "x", "be seen", 1)
    with raises("op: softmax_scale must be finite, got nan"):
        dims.require(False, "softmax_scale", "be finite", float("nan"))


def test_rows_contiguous_takes_any_outer_stride(dims):
    base = torch.zeros(4, 8, 32)
    dims.rows_contiguous("q", base[::2, 1:5, 8:16])
    dims.rows_contiguous("column", base[..., ::2][..., :1])
    with raises("op: q must have a contiguous last axis, got strides (256, 32, 2)"):
        dims.rows_contiguous("q", base[..., ::2])


def test_writable_refuses_an_expanded_tensor(dims):
    dims.writable("out", torch.zeros(4, 8)[:, 2:5])
    dims.writable("out", torch.zeros(1, 8).expand(1, 8))
    with raises("op: out must be writable, got stride 0 on axis 0 (an expanded tensor)"):
        dims.writable("out", torch.zeros(1, 8).expand(4, 8))
    with raises("op: out must have a contiguous last axis, got strides (1, 4)"):
        dims.writable("out", torch.zeros(8, 4).T)


def test_writable_takes_slices_of_packed_tensors(dims):
    base = torch.zeros(4, 6, 5, 8)
    for view in (
        base[1:, :, ::2, 2:5],
        base.transpose(0, 1),
        base.permute(2, 0, 1, 3)[::3],
        base[:, 0, :, :1],
        base[:0].transpose(0, 1),
        torch.zeros(10).as_strided((3, 1, 2), (3, 1, 1)),  # a stride along one element says nothing
        torch.zeros(6).as_strided((2, 3), (3, 1)),
    ):
        dims.writable("out", view)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 3), (2, 1)),
        ((3, 4, 8), (8, 8, 1)),
        ((3, 4, 8), (31, 8, 1)),
        ((3, 4, 8), (8, 23, 1)),
        ((2, 2, 1), (1, 1, 1)),
    ],
)
def test_writable_refuses_elements_that_share_memory(dims, shape, strides):
    tensor = torch.zeros(100).as_strided(shape, strides)
    got = f"shape {shape} with strides {strides}, whose elements share memory"
    with raises(f"op: out must be writable, got {got}"):
        dims.writable("out", tensor)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_starts_that_are_right_pass(dims, dtype):
    dims.starts("q_starts", torch.tensor([0, 3, 3, 7], dtype=dtype), 7, "q.shape[0]")
    dims.starts("q_starts", torch.tensor([0], dtype=dtype), 0, "q.shape[0]")
    dims.starts("q_starts", torch.tensor([0, 9], dtype=dtype), None)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 3], "op: q_starts[0] must be 0, got 1"),
        ([0, 4, 2, 7], "op: q_starts[2] must not be below q_starts[1] = 4, got 2"),
        ([0, -1], "op: q_starts[1] must not be below q_starts[0] = 0, got -1"),
        ([0, 3, 6], "op: q_starts[-1] must equal q.shape[0], 7, got 6"),
        ([], "op: q_starts must have batch + 1 entries, got none"),
    ],
    ids=str,
)
def test_starts_that_are_wrong_name_the_entry(dims, offsets, message):
    with raises(message):
        dims.starts("q_starts", torch.tensor(offsets, dtype=torch.int32), 7, "q.shape[0]")


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_lengths_name_the_entry(dims, dtype):
    dims.lengths("kv_lens", torch.tensor([0, 5, 9], dtype=dtype), 9, "capacity")
    with raises("op: kv_lens[1] must not exceed capacity, 9, got 10"):
        dims.lengths("kv_lens", torch.tensor([0, 10], dtype=dtype), 9, "capacity")


def test_lengths_refuses_negative_entries_and_uint32_beyond_int32(dims):
    with raises("op: kv_lens[1] must not be negative, got -1"):
        dims.lengths("kv_lens", torch.tensor([0, -1]), 9, "capacity")
    with raises("op: kv_lens[0] must not be negative, got -1"):
        dims.lengths("kv_lens", torch.tensor([2**32 - 1], dtype=torch.uint32), 9, "capacity")


def test_as_signed_shares_memory():
    unsigned = torch.tensor([1, 2], dtype=torch.uint32)
    assert as_signed(unsigned).dtype == torch.int32
    assert as_signed(unsigned).data_ptr() == unsigned.data_ptr()
    signed = torch.tensor([1])
    assert as_signed(signed) is signed


def test_values_of_cpu_tensors_are_visible_and_of_meta_tensors_never():
    assert values_visible(torch.zeros(1))
    with knobs.override(check_values=True):
        assert not values_visible(torch.zeros(1, device="meta"))


@pytest.mark.gpu
def test_values_of_gpu_tensors_are_visible_on_demand(dims):
    lengths = torch.tensor([99], device="cuda")
    dims.lengths("kv_lens", lengths, 9, "capacity")
    with (
        knobs.override(check_values=True),
        raises("op: kv_lens[0] must not exceed capacity, 9, got 99"),
    ):
        dims.lengths("kv_lens", lengths, 9, "capacity")


def test_unsupported_is_a_not_implemented_error():
    assert issubclass(UnsupportedError, NotImplementedError)


def test_lengths_count_new_tokens():
    dims = Dims("op")
    dims.new_tokens_counted((5, 0, 3), (5, 0, 1))
    with raises("op: kv_lens[1] must include the 2 new tokens of the request, got 1"):
        dims.new_tokens_counted((5, 1), (0, 2))


@pytest.mark.parametrize("number", [2, 0.5, Fraction(1, 2), np.float32(0.1), np.int64(3)])
def test_finite_takes_every_real_number(dims, number):
    assert dims.finite("scale", number) == float(number)
    assert type(dims.finite("scale", number)) is float


@pytest.mark.parametrize("value", [True, np.True_, "1", None, 1j, torch.tensor(1.0)], ids=repr)
def test_finite_refuses_what_is_no_number(dims, value):
    with raises(f"op: scale must be a number, got {type(value).__name__}", TypeError):
        dims.finite("scale", value)


def test_finite_refuses_integers_that_are_no_float(dims):
    with raises("op: scale must be finite, got a number above 1.7976931348623157e+308"):
        dims.finite("scale", 10**400)
