"""Arguments that take one of a few names: their types, the names there are, and misspelt ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import pytest
import torch

import mlakit
from mlakit import ops
from mlakit.dispatch import knobs, selection
from mlakit.dispatch.names import BACKENDS, Backend, DecodeKernel
from mlakit.formats import (
    FORMATS,
    GROUP_FORMATS,
    SPLIT_FORMATS,
    Format,
    known_format,
    row_codec,
    rows,
)
from mlakit.model.geometry import ROPES, MLAGeometry, Rope, RowShape
from mlakit.tools.workloads.case import Case

TYPES = {"backend": Backend, "format": Format, "rope": Rope}
ROW = RowShape(512, 64)


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions, and the methods of public classes."""
    public = {name: getattr(mlakit, name) for name in mlakit.__all__}
    public |= {name: getattr(ops, name) for name in ops.__all__} | {"Case": Case}
    for name, value in public.items():
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            yield name, value.__init__
            for member in vars(value).values():
                function = getattr(member, "__func__", member)
                if inspect.isfunction(function) and not function.__name__.startswith("_"):
                    yield f"{name}.{function.__name__}", function


CHOICES = {
    (name, argument): get_type_hints(function)[argument]
    for name, function in functions()
    for argument in TYPES
    if argument in inspect.signature(function).parameters
}


def test_the_types_have_the_names_that_are_registered():
    assert set(get_args(Backend)) == {"auto", *(spec.backend for spec in selection.SPECS)}
    assert get_args(Backend) == BACKENDS == ("auto", *selection.BACKENDS)
    assert get_args(DecodeKernel) == tuple(
        spec.name for spec in selection.specs("mla_decode") if spec.kernel
    )
    assert get_args(Format) == (*FORMATS, *GROUP_FORMATS, *SPLIT_FORMATS) == tuple(rows._BUILDERS)
    assert get_args(Rope) == ROPES


def test_the_public_functions_with_a_choice_are_found():
    found = {name for name, _ in CHOICES}
    assert {name for name in ops.__all__ if name.islower()} <= found
    assert {
        "decode_branch",
        "prefill_branch",
        "mla_step",
        "sparse_step",
        "plan_mla_decode",
    } <= found
    assert {"PagedLatentCache.allocate", "PagedLatentCache.wrap", "UpProjection.expand"} <= found
    assert {"LayerWeights", "MLAGeometry"} <= found


@pytest.mark.parametrize(("function", "argument"), CHOICES)
def test_a_choice_is_a_literal_type_in_every_public_signature(function, argument):
    type_ = TYPES[argument]
    if argument == "backend" and function in ("mla_decode", "plan_mla_decode"):
        type_ = Backend | DecodeKernel
    assert CHOICES[function, argument] in (type_, type_ | None)


@pytest.mark.parametrize("name", ["fp7", "", "BF16", None, 8, ["bf16"]], ids=repr)
def test_a_format_that_is_none_is_refused_with_the_choices(name):
    message = r"^unknown cache format .*; choose from bf16, fp16, fp32, fp8, fp8_token, fp8_block"
    with pytest.raises(ValueError, match=message):
        known_format(name)
    with pytest.raises(ValueError, match=message):
        mlakit.PagedLatentCache.allocate(ROW, name, num_pages=1)
    if name is not None:  # then the format is inferred
        with pytest.raises(ValueError, match=message):
            mlakit.PagedLatentCache.wrap(torch.zeros(1, 64, 656).byte(), ROW, format=name)
    if not isinstance(name, list):
        with pytest.raises(ValueError, match=message):
            row_codec(name, ROW)


UNKNOWN_BACKEND = r"backend must be one of auto, blackwell, hopper, triton, cpu, got 'cuda'$"


def test_a_backend_that_is_none_is_refused_by_what_is_no_op():
    """The ops and branches have tests of their own."""
    model = MLAGeometry.preset("minicpm3").with_heads(2)
    up = mlakit.UpProjection.from_checkpoint(torch.zeros(2 * 128, 256).bfloat16(), model)
    with pytest.raises(ValueError, match=UNKNOWN_BACKEND):
        up.expand(torch.zeros(3, 256).bfloat16(), backend="cuda")
    cache = mlakit.PagedLatentCache.allocate(model, num_pages=2)
    kv_lens, table = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"mla_decode: {UNKNOWN_BACKEND}"):
        mlakit.plan_mla_decode(cache, table, kv_lens, heads=2, backend="cuda")
    with pytest.raises(
        ValueError, match=r"^knob backend must be one of auto, blackwell, hopper, triton, cpu"
    ):
        knobs.override(backend="cuda").__enter__()
