"""Wrong calls of the documented functions: the error says what is wrong, and nothing was written.

The calls are rows of tables (`wrong_calls`) that give the message that must come of them,
so each message is also seen to be of the house's form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.tools.testing import assert_unchanged, snapshot
from tests.compat.modular.calls import (
    INT_MAX,
    MAKERS,
    PAGES,
    WRITERS,
    Call,
    Make,
    causal,
    collection,
    contiguous_decode,
    drawn,
    fused,
    fused_kernel,
    name_of,
    padded_decode,
    plan,
    prefill,
    ragged_decode,
    scaled_collection,
    sparse,
    split_scalars,
    spoil,
)
from tests.compat.modular.scaled_calls import SCALED_MAKERS, SCALED_WRITERS
from tests.compat.modular.wrong_attention_calls import WRONG_ATTENTION_CALLS
from tests.compat.modular.wrong_cache_calls import WRONG_CACHE_CALLS
from tests.compat.modular.wrong_scaled_calls import WRONG_SCALED_CALLS
from tests.spoiling import Edit

HOUSE_FORM = re.compile(r"\S.* must \S.*, got \S.*")

TABLES = (WRONG_CACHE_CALLS, WRONG_ATTENTION_CALLS, WRONG_SCALED_CALLS)
ROWS = [(make, wrong) for table in TABLES for make, wrongs in table.items() for wrong in wrongs]
NAMES = [f"{make.__name__}: {wrong.message}" for make, wrong in ROWS]


@pytest.mark.parametrize("make", [*MAKERS, *SCALED_MAKERS], ids=name_of)
def test_the_calls_that_the_tables_spoil_pass(make):
    """Without this, a row could pass for a reason that is not its own."""
    make()()


@pytest.mark.parametrize("make", [*WRITERS, *SCALED_WRITERS], ids=name_of)
def test_a_call_that_passes_writes(make):
    """Without this, "nothing was written" would say nothing."""
    call = make()
    before = snapshot(**call.storages())
    call()
    with pytest.raises(AssertionError, match="was written to"):
        assert_unchanged(before)


def test_every_row_is_one_of_a_kind_and_of_the_house_form():
    assert len(NAMES) == len(set(NAMES))
    assert all(HOUSE_FORM.fullmatch(wrong.message) for _, wrong in ROWS)


@pytest.mark.parametrize(("make", "wrong"), ROWS, ids=NAMES)
def test_a_wrong_call_says_what_is_wrong_and_writes_nothing(make, wrong):
    call = spoil(make(), wrong.changes)
    before = snapshot(**call.storages())
    with pytest.raises(wrong.error) as caught:
        call()
    assert type(caught.value) is wrong.error
    assert re.fullmatch(wrong.pattern(call.name), str(caught.value))
    assert_unchanged(before)


FLAGS = ("ragged", "per_token_scale_rope_aware")  # Python takes the truth of anything


@pytest.mark.parametrize("make", [*MAKERS, *SCALED_MAKERS], ids=name_of)
def test_no_argument_takes_what_is_nothing_it_could_mean(make):
    for name in make().arguments.keys() - set(FLAGS):
        for nonsense in (object(), torch.zeros(1, 1, 1, 1, 1, 1, 1, dtype=torch.complex64)):
            call = spoil(make(), {name: nonsense})
            before = snapshot(**call.storages())
            with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(call.name)}(:|\(\)) "):
                call()
            assert_unchanged(before)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [*WRITERS, *SCALED_WRITERS, plan], ids=name_of)
def test_tensors_of_two_devices_are_refused(make):
    names = [name for name, value in make().arguments.items() if isinstance(value, Tensor)]
    for name in names:
        call = spoil(make(), {name: Edit(lambda tensor: tensor.to("cuda"))})
        before = snapshot(**call.storages())
        two_devices = rf"^{call.name}: \w+ must be on the device of \w+, (cpu|cuda:0), got "
        with pytest.raises(ValueError, match=two_devices):
            call()
        assert_unchanged(before)


def refusal(call: Call) -> str | None:
    """The message of the ValueError that the call raises, if it does."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [*WRITERS, *SCALED_MAKERS, collection, scaled_collection, plan], ids=name_of
)
def test_no_number_in_an_integer_tensor_gets_past_the_checks_to_a_crash(make):
    sizes = {
        name: tensor.numel()
        for name, tensor in make().tensors().items()
        if tensor.dtype == torch.int32
    }
    for name, size in sizes.items():
        for index in range(size):
            for hostile in (-INT_MAX - 1, -1, 1, PAGES, INT_MAX):
                call = make()
                call.tensors()[name].view(-1)[index] = hostile
                before = snapshot(**call.storages())
                if message := refusal(call):
                    assert message.startswith(f"{call.name}: ")
                    assert_unchanged(before)


@dataclass(frozen=True)
class Miscall:
    """A call that Python itself refuses."""

    make: Make
    complaint: str
    without: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.make.__name__}: {self.complaint}"


def without(name: str, *makes: Make) -> list[Miscall]:
    missing = f"missing 1 required ... argument: '{name}'"
    return [Miscall(make, missing, without=name) for make in makes]


def unknown(name: str, *makes: Make, value: Any = None) -> list[Miscall]:
    unexpected = f"got an unexpected keyword argument '{name}'"
    return [Miscall(make, unexpected, extra={name: value}) for make in makes]


MISCALLS = [
    *without("scale", ragged_decode, contiguous_decode, prefill, sparse),
    *without("mask_functor", ragged_decode, contiguous_decode),
    *without("output", ragged_decode, contiguous_decode, prefill, sparse),
    *without("valid_length", ragged_decode),
    *without("k", ragged_decode),
    *without("kv", fused_kernel),
    *without("kv_input", fused),
    *without("attn_sink", sparse),
    *without("indices_stride", sparse),
    *without("page_size", plan),
    *without("sm_count", split_scalars),
    *without("cache_lengths", collection),
    *unknown("sink", ragged_decode, contiguous_decode, prefill),
    *unknown("valid_length", contiguous_decode),
    *unknown("q_scale", contiguous_decode),
    *unknown("k", contiguous_decode, value=drawn(2, 5, 1, 576)),
    *unknown("layer_idx", fused_kernel, sparse),
    *unknown("kv", fused),
    *unknown("value_blocks", collection),
    *unknown("local_window_size", causal),
]


@pytest.mark.parametrize("miscall", MISCALLS, ids=str)
def test_missing_and_unknown_arguments_name_the_function(miscall):
    call = spoil(miscall.make(), miscall.extra)
    call.arguments.pop(miscall.without, None)
    before = snapshot(**call.storages())
    with pytest.raises(TypeError) as caught:
        call()
    complaint = re.escape(miscall.complaint).replace(r"\.\.\.", ".+")
    assert re.fullmatch(
        rf"{re.escape(call.name)}(\.__init__)?\(\) {complaint}(\. Did you mean .+)?",
        str(caught.value),
    )
    assert_unchanged(before)


@pytest.mark.parametrize(
    ("make", "most"), [(ragged_decode, 7), (contiguous_decode, 6)], ids=name_of
)
def test_too_many_positional_arguments_name_the_function(make, most):
    call = make()
    order = ("output", "q", "k", "k_tensor", "mask_functor", "valid_length", "scale")
    given = [call.arguments.pop(name) for name in order if name in call.arguments]
    call.positional = (*given, None, 1)
    with pytest.raises(TypeError, match=rf"^flare_mla_decoding\(\) takes from .+ to {most} posit"):
        call()


def test_a_plan_of_too_many_chunks_says_how_many_it_needs():
    call = spoil(plan(), {"max_chunks": 1})
    before = snapshot(**call.storages())
    with pytest.raises(
        ValueError, match=r"^mla_prefill_plan: max_chunks must be at least 2 .*got 1$"
    ):
        call()
    assert_unchanged(before)


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (fused_kernel, "norm_rope_quant_append"),
        (fused, "norm_rope_quant_append"),
        (prefill, "norm_rope_quant_append"),
        (prefill, "quantize_fp8"),
        (prefill, "scaled_mm_fp8"),
        (prefill, "mla_prefill"),
        (ragged_decode, "mla_decode"),
        (padded_decode, "mla_decode"),
        (contiguous_decode, "mla_decode"),
        (sparse, "sparse_mla"),
    ],
    ids=name_of,
)
def test_a_call_that_no_kernel_takes_writes_nothing(make, op, monkeypatch):
    select = selection.select

    def refusing(asked, problem, backend="auto"):
        if asked == op:
            raise UnsupportedError(f"{asked}: no kernel for {problem}")
        return select(asked, problem, backend)

    call = make()
    before = snapshot(**call.storages())
    monkeypatch.setattr(selection, "select", refusing)
    with pytest.raises(UnsupportedError, match=f"^{op}: no kernel for cpu, dtype=torch.bfloat16"):
        call()
    assert_unchanged(before)
