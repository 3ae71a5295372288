"""Random launches reach every Hopper kernel, with every row, dtype and width that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice, product

import pytest

from mlakit.dispatch import selection
from mlakit.dispatch.specs import KernelSpec, Problem, ProductShape, Use
from mlakit.formats import SPLIT_FORMATS
from mlakit.kernels.hopper import support
from mlakit.kernels.hopper.fp8.configs import CONFIGS as PRODUCT_TILES
from mlakit.kernels.hopper.prefill.configs import BLOCK_K, FP8_BLOCK_K
from mlakit.model.geometry import RowShape
from mlakit.tools.check import Settings, random_launches
from mlakit.tools.workloads import (
    Case,
    DecodeCase,
    IndexerLogitsCase,
    PrefillCase,
    ScaledMatmulCase,
    SparseCase,
)
from mlakit.tools.workloads.inputs import DTYPES
from mlakit.tools.workloads.random_launches import BY_NAME, LAUNCHES

NUM_SMS = 132
SPECS = [spec for spec in support.SPECS if spec.op in LAUNCHES]
ROWS = (RowShape(512, 64), RowShape(256, 64), RowShape(512, 0), RowShape(448, 64, 512))
FORMATS = (*support.FORMATS, *support.FP4_FORMATS, "fp8_block64", *SPLIT_FORMATS)
QUERIES = ("bf16", "fp16", "e4m3")


def problem(**fields: object) -> Problem:
    return Problem("cuda", 90, **{"num_sms": NUM_SMS, **fields})  # type: ignore[arg-type]


def described(case: Case) -> Problem:
    """Return what dispatch sees of a launch whose tensors are packed."""
    if isinstance(case, ScaledMatmulCase):
        shape = ProductShape(max(case.batch, 1), case.m, case.n, case.k, case.n_group, case.k_group)
        return problem(dtype=str(DTYPES[case.out_dtype]), product=shape)
    if isinstance(case, PrefillCase):
        widths = (case.qk_nope_head_dim, case.qk_rope_head_dim, case.v_head_dim)
        return problem(dtype=str(DTYPES[case.dtype]), head_widths=widths, mask=case.mask)
    assert isinstance(case, DecodeCase | SparseCase | IndexerLogitsCase)
    facts = {
        "dtype": str(DTYPES[case.dtype]),
        "format": case.format,
        "heads": case.heads,
        "page_size": case.page_size,
        "row": case.row,
    }
    if isinstance(case, SparseCase):
        return problem(**facts)
    if isinstance(case, IndexerLogitsCase):
        return problem(**facts, mask=case.mask)
    uses = [Use.Q_SCALE] * case.q_scaled
    uses += [Use.BF16_Q_ROPE] * (case.dtype == "e4m3" and case.q_rope_dtype == "bf16")
    pages = -(-max(case.kv_lens) // case.page_size) + case.spare_pages
    return problem(
        **facts,
        mask=case.mask,
        uses=tuple(uses),
        num_tokens=sum(case.q_lens),
        max_keys=pages * case.page_size,
    )


@cache
def drawn(op: str) -> tuple[Problem, ...]:
    settings = Settings((op,), 0, "cuda", "hopper", launches=1)
    return tuple(described(launch) for _, launch in islice(random_launches(settings), 1500))


def taken(spec: KernelSpec) -> Iterator[Problem]:
    """The drawn launches that are checked where this kernel is asked for."""
    name = spec.name if spec.kernel in BY_NAME else "hopper"
    for each in drawn(spec.op):
        # a launch of another kernel may be none of a kernel that is asked for by name
        refused = spec.why_not(each) if spec.kernel in BY_NAME else None
        if refused is None and selection.select(spec.op, each, name) == spec:
            yield each


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_kernel_is_reached_and_every_launch_is_taken(spec):
    assert next(taken(spec), None) is not None
    for each in drawn(spec.op):
        assert selection.select(spec.op, each, "hopper").backend == "hopper"


def test_every_hopper_kernel_has_launches():
    assert {spec.op for spec in support.SPECS} <= set(LAUNCHES)


def rows_of(found: Problem) -> tuple[object, ...]:
    """What the loads and products of a kernel of attention depend on."""
    assert found.row is not None
    return found.format, found.dtype, found.row.kv_lora_rank, found.row.qk_rope_head_dim


@pytest.mark.parametrize(
    "spec", [s for s in SPECS if s.op in ("mla_decode", "sparse_mla")], ids=str
)
def test_every_row_and_dtype_that_a_kernel_takes_is_drawn(spec):
    possible = set()
    for format, dtype, row in product(FORMATS, QUERIES, ROWS):
        if format in SPLIT_FORMATS and row not in ROWS[:2]:
            continue  # no format has such rows in two tensors
        facts = {"format": format, "row": row, "heads": 16, "page_size": 64}
        asked = problem(**facts, dtype=str(DTYPES[dtype]))
        if spec.why_not(asked) is None:
            possible.add(rows_of(asked))
    missing = possible - {rows_of(each) for each in taken(spec)}
    assert not missing


def test_every_width_mask_and_dtype_of_prefill_is_drawn():
    (spec,) = (spec for spec in SPECS if spec.op == "mla_prefill")
    found = list(taken(spec))
    plain = {each.head_widths for each in found if "e4m3" not in each.dtype}
    assert plain == set(BLOCK_K)
    assert {each.head_widths for each in found if "e4m3" in each.dtype} == set(FP8_BLOCK_K)
    assert {each.mask for each in found} == set(spec.masks)
    assert {each.dtype for each in found} == set(support.PREFILL_DTYPES)


def test_every_mask_of_the_indexer_and_every_tile_of_products_is_drawn():
    (indexer,) = (spec for spec in SPECS if spec.op == "indexer_logits")
    assert {each.mask for each in taken(indexer)} == set(indexer.masks)
    (products,) = (spec for spec in SPECS if spec.op == "scaled_mm_fp8")
    assert products.variant is not None
    tiles = {products.variant(each) for each in taken(products)}
    assert tiles == {config.name for config in PRODUCT_TILES}
    assert {each.dtype for each in taken(products)} == set(support.PRODUCT_DTYPES)
