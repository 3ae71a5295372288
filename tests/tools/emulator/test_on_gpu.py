"""The emulator computes what a GPU computes: the same launches, with the same inputs, on both.

Sums of products agree to the bit (`reference.hopper_fp8_mma`). The GPU's exp2 and log2 are off by
up to 2**-22, and Triton's reductions add up in another order. So float32 results agree to two units
in the last place, 16-bit results to one. A probability that lies between two 16-bit numbers may be
rounded to either, which changes the float32 partial sums of its row: most rows agree to two units.

The error of log2 is relative. The e4m3 prefill kernel sums probabilities times 2**8: the logarithm
of such a sum, up to 16, may be off by 2**-18, which is six units of an lse between 4 and 8.

What was found is in `gpu_findings.FILE`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.tools.compile.configurations import HOPPER
from mlakit.tools.emulator import harness
from mlakit.tools.emulator.frontend import emulating_mlakit
from tests.tools.emulator import gpu_findings, gpu_runs

CONFIGURATIONS = 30
ALLOWED_UNITS = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 2.0}
SHIFTED, ALLOWED_SHIFTED = "hopper-prefill-fp8", 6.0  # units of its lse
MOST = 0.9  # of the rows of partial sums
# those with several splits, with every loader and every format are spread over the list
NAMES = [list(HOPPER)[i * len(HOPPER) // CONFIGURATIONS] for i in range(CONFIGURATIONS)]


def results(name: str, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Run a configuration as the emulator's tests do; return results and partials, on the CPU."""
    chosen = harness.configuration(name)
    trial = replace(chosen.case, seed=0).trial(device)
    with gpu_runs.partials() as partials:
        given = gpu_runs.call(trial, chosen.selects_for)
    return [each.cpu() for each in given], [each.cpu() for each in partials]


def row_units(got: Tensor, want: Tensor) -> Tensor:
    """Return the largest difference of each row in units in the last place.

    They are those of the largest number of a row for 16-bit results, and those of the largest
    number of all rows for float32 ones: scores, whose sums these are, are as large in every row.
    """
    same = (got == want) | (got.isnan() & want.isnan())
    both = torch.stack([got.double(), want.double()])
    sizes = both.nan_to_num(0, 0, 0).abs().amax(0)
    sizes = sizes.amax() if got.dtype == torch.float32 else sizes.amax(-1, keepdim=True)
    unit = torch.finfo(got.dtype).eps * 2.0 ** sizes.clamp(min=2.0**-100).log2().floor()
    apart = torch.where(same, 0.0, (both[0] - both[1]).abs() / unit)
    return apart.nan_to_num(torch.inf).reshape(-1, apart.shape[-1]).amax(-1)


def units(got: Tensor, want: Tensor) -> float:
    """Return the largest difference of all rows."""
    return float(row_units(got, want).max()) if got.numel() else 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gives_the_same_results(name: str, record_property: Callable[..., None]) -> None:
    with gpu_runs.few_sms():
        on_gpu, gpu_partials = results(name, "cuda")
    with emulating_mlakit(seed=0, hardware_sums=True):
        emulated, partials = results(name, "cpu")
    apart = [units(*both) for both in zip(on_gpu, emulated, strict=True)]
    kinds = [str(each.dtype).removeprefix("torch.") for each in on_gpu]
    rows = [row_units(*both) for both in zip(gpu_partials, partials, strict=True)]
    allowed = ALLOWED_UNITS[torch.float32]
    share = min((float((each <= allowed).float().mean()) for each in rows), default=1.0)
    gpu_findings.add(
        "emulated and on a GPU, units in the last place",
        name,
        results=dict(zip(kinds, apart, strict=True)),
        partials=[float(each.max()) for each in rows],
        partial_rows=sum(int(each.isfinite().any(-1).sum()) for each in partials if each.ndim > 1),
        partial_rows_within_2_units=share,
    )
    said = ", ".join(f"{each:.2f} of {kind}" for each, kind in zip(apart, kinds, strict=True))
    said = f"{said}; {share:.1%} of the rows of partials within {allowed} units"
    record_property("terminal", f"{name}: units in the last place: {said}")
    limits = [ALLOWED_UNITS[each.dtype] for each in on_gpu]
    if name.startswith(SHIFTED):
        limits[1] = ALLOWED_SHIFTED
    assert all(a <= b for a, b in zip(apart, limits, strict=True)), said
    assert share >= MOST, said
    # a probability that is rounded the other way changes a sum by no more than a 16-bit unit
    wide = torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps
    assert all(float(each.max()) <= wide for each in rows), said


@pytest.mark.parametrize("change", [partial(torch.mul, other=1.02), torch.zeros_like])
def test_other_results_are_told_apart(change: Any) -> None:
    given = torch.randn(4, 64).bfloat16()
    assert units(given, given) == 0
    assert units(change(given), given) > 1


def test_rows_are_compared_one_by_one() -> None:
    given = torch.ones(4, 64)
    given[3] = torch.nan
    other = given.clone()
    other[1, 5] += 2.0**-20
    assert row_units(other, given).tolist() == [0, 8, 0, 0]
    assert units(torch.full((1, 64), torch.nan), given[:1]) == torch.inf
