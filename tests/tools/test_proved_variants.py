"""Every variant of a kernel that needs a proof has a configuration that `mlakit check` proves it
by: without one, `explain` would recommend a check that cannot enable the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from mlakit.dispatch import proofs, selection
from mlakit.dispatch.names import Backend
from mlakit.dispatch.specs import Problem, ProductShape, pretending
from mlakit.formats import FORMATS, GROUP_FORMATS, SPLIT_FORMATS
from mlakit.kernels.blackwell import support
from mlakit.model.geometry import RowShape
from mlakit.model.masks import KINDS
from mlakit.tools import prove
from mlakit.tools.compile.configurations import MUCH_WORK, SPECIALISED

GPUS: dict[Backend, tuple[int, int]] = {"hopper": (90, 132), "blackwell": (100, 148)}
DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32", "torch.float8_e4m3fn")
CACHED_ROWS = (
    *(RowShape(512, 64), RowShape(512, 0), RowShape(448, 64, v_width=512)),
    *(RowShape(256, 64), RowShape(128, 0)),
)
HEADS = (8, 16, 32, 64, 128)
WIDTHS = (
    *((128, 64, 128), (192, 64, 256), (128, 0, 128)),
    *((64, 32, 64), (256, 0, 256), (64, 64, 128)),
)
SHAPES = [
    ProductShape(1, rows, columns, 528, 128, 128)
    for rows, columns in product((9, 30, 50, 70, 600, 2100), (60, 256, 4096, 8600))
]


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    """A Triton that can compile the kernels, whichever is installed."""
    monkeypatch.setattr(support, "version", lambda package: "3.9.0")


def problems(arch: int, num_sms: int) -> Iterator[Problem]:
    """Yield problems with everything that selects a kernel or its code."""
    given = {"device": "cuda", "arch": arch, "num_sms": num_sms, "page_size": 64}
    formats = (*FORMATS, *GROUP_FORMATS, *SPLIT_FORMATS)
    for dtype, format, row, heads in product(DTYPES, formats, CACHED_ROWS, HEADS):
        problem = Problem(**given, dtype=dtype, format=format, row=row, heads=heads)
        yield from (problem, replace(problem, has_extra=True))
        yield from (replace(problem, mask=mask) for mask in ("null", "causal"))
    for dtype, widths, mask in product(DTYPES, WIDTHS, KINDS):
        yield Problem(**given, dtype=dtype, head_widths=widths, heads=2, mask=mask)
    for dtype, shape in product(DTYPES, SHAPES):
        yield Problem(**given, dtype=dtype, product=shape)


def named_by_support(backend: Backend) -> set[str]:
    """Return the variants of the calls that kernels of a backend accept."""
    specs = [spec for spec in selection.SPECS if spec.backend == backend and spec.variant]
    found = {
        proofs.configuration(spec, problem)
        for problem in problems(*GPUS[backend])
        for spec in specs
        if _is_described(spec.op, problem) and spec.why_not(problem) is None
    }
    return found - {""}


def _is_described(op: str, problem: Problem) -> bool:
    """Return whether a problem has what problems of `op` have."""
    if op == "mla_prefill":
        return problem.head_widths is not None
    if op == "scaled_mm_fp8":
        return problem.product is not None
    return problem.row is not None and bool(problem.mask) == (op != "sparse_mla")


@pytest.mark.slow
@pytest.mark.parametrize("backend", GPUS)
def test_every_variant_has_a_configuration_that_proves_it(backend, monkeypatch):
    archs, cases = SPECIALISED[backend]
    # the m64 kernels, which much work selects, need no proof, and their inputs take a minute
    few = {
        name: case
        for name, case in cases.items()
        if getattr(case, "kv_lens", None) != MUCH_WORK["kv_lens"]
    }
    monkeypatch.setattr(prove, "SPECIALISED", {**SPECIALISED, backend: (archs, few)})
    with pretending(*GPUS[backend]):
        proved = {each.proof for each in prove.configurations(backend, "cpu")}
    named = named_by_support(backend)
    assert named
    assert named - proved == set(), "no configuration proves these"
    assert proved - named == set(), "this test has no problem with these"
