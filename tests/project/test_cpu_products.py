"""Products of 16-bit matrices in float32: rounded once; those of other types are torch's own."""

from __future__ import annotations

import pytest
import torch

from tests import cpu_products

HALVES = (torch.bfloat16, torch.float16)
SHAPES = {
    "mm": ((5, 40), (40, 7)),
    "bmm": ((3, 5, 40), (3, 40, 7)),
    "addmm": ((7,), (5, 40), (40, 7)),
    "baddbmm": ((3, 5, 7), (3, 5, 40), (3, 40, 7)),
}


def test_every_operator_is_here():
    assert tuple(SHAPES) == cpu_products.OPERATORS


@pytest.mark.parametrize("operator", SHAPES)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64], ids=str)
def test_products(operator, dtype, generator):
    matrices = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES[operator]]
    function = getattr(torch, operator)
    factors = {"beta": 0.5, "alpha": 2.0} if "add" in operator else {}
    wide = torch.float32 if dtype in HALVES else dtype
    exact = function(*(each.to(wide) for each in matrices), **factors)
    found = cpu_products.in_float32(function, HALVES)(*matrices, **factors)
    assert found.dtype is dtype
    assert torch.equal(found, exact.to(dtype))


@pytest.mark.parametrize("operator", SHAPES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_torch_uses_them_where_it_has_only_a_loop(operator, dtype, generator):
    if dtype not in cpu_products.slow_types():
        pytest.skip("torch has more than a loop")
    matrices = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES[operator]]
    exact = getattr(torch, operator)(*(each.float() for each in matrices))
    assert torch.equal(getattr(torch, operator)(*matrices), exact.to(dtype))


def test_shapes_that_do_not_match_are_refused():
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        cpu_products.in_float32(torch.mm, HALVES)(torch.ones(2, 3), torch.ones(4, 2))
