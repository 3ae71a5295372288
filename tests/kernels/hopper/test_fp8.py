"""Hopper's block-scaled FP8 product: what it takes, the tiles it picks, and its results."""

from __future__ import annotations

from random import Random

import pytest
import torch

from mlakit import scaled_mm_fp8
from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.specs import Problem, ProductShape, Use, pretending
from mlakit.kernels.hopper.decode.configs import OTHER_SMEM_BYTES, REGISTERS, SMEM_BYTES
from mlakit.kernels.hopper.fp8.configs import CONFIGS, MAX_SWAPPED_ROWS, ProductConfig, pick_config
from mlakit.tools.workloads import ScaledMatmulCase
from mlakit.tools.workloads.random_cases import SeededDraw, random_case
from tests.pairs import pairwise

OP = "scaled_mm_fp8"
E4M3 = torch.float8_e4m3fn
H200_SMS = 132
EVERY_CONFIG = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)


def shape(rows: int, columns: int = 7168, depth: int = 16384, batch: int = 1) -> ProductShape:
    return ProductShape(batch, rows, columns, depth, n_group=128, k_group=128)


def problem(dtype: str = "torch.bfloat16", uses: tuple[Use, ...] = (), **sizes: int) -> Problem:
    product = shape(4096)._replace(**sizes)
    return Problem("cuda", 90, dtype=dtype, uses=uses, num_sms=H200_SMS, product=product)


@pytest.mark.parametrize(
    "asked",
    [
        problem(),
        problem("torch.float8_e4m3fn"),
        problem(rows=17, batch=128),
        problem(rows=4),
        problem(n_group=256, k_group=512),
        problem(n_group=10_000, k_group=20_000),
        problem(depth=16, columns=1, rows=20, n_group=1, k_group=16),
        problem(rows=0, columns=0),
    ],
    ids=str,
)
def test_what_the_kernel_takes(asked):
    assert selection.select(OP, asked, "hopper").backend == "hopper"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (
            problem("torch.float32"),
            "needs results of torch.bfloat16 or torch.float8_e4m3fn, got torch.float32",
        ),
        (problem(depth=0), "needs columns to add up, got none"),
        (problem(n_group=64), "needs n_group of a multiple of 128, got 64"),
        (problem(k_group=192), "needs k_group of a multiple of 128, got 192"),
        (
            problem(uses=(Use.UNALIGNED_OPERANDS,)),
            "takes no unaligned rows of a or b: no TMA descriptor can address them",
        ),
        (Problem("cuda", 90, dtype="torch.bfloat16"), "needs the sizes of a product, got none"),
        (Problem("cuda", 100), "needs sm_90, got sm_100"),
        (Problem("cpu"), "needs sm_90, got cpu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_left_to_the_portable_kernel(asked, reason):
    assert selection.explain(OP, asked)["hopper"] == reason


def test_auto_takes_only_tiles_that_a_check_has_proved():
    (spec,) = (spec for spec in selection.specs(OP) if spec.backend == "hopper")
    assert spec.variant is not None
    assert spec.variant(problem()) == "256x128"
    assert spec.variant(problem(rows=30)) == "swapped 64x32"
    assert selection.select(OP, problem()).backend == "triton"
    assert "has not been checked on this machine" in str(selection.explain(OP, problem())["hopper"])


@pytest.mark.parametrize(("rows", "is_slower"), [(16, True), (17, False)])
def test_few_rows_are_faster_on_the_portable_kernel(rows, is_slower):
    (spec,) = (spec for spec in selection.specs(OP) if spec.backend == "hopper")
    assert spec.why_slower is not None
    expected = f"is for more than 16 rows, got {rows}" if is_slower else None
    assert spec.why_slower(problem(rows=rows)) == expected


@pytest.mark.parametrize(
    ("sizes", "is_slower"),
    [
        ({"columns": 576}, True),
        ({"columns": 64 * 65}, True),
        ({"columns": 64 * 66}, False),
        ({"columns": 576, "batch": 8}, False),
        ({"columns": 576, "rows": 33}, False),
    ],
    ids=str,
)
def test_few_tiles_of_few_rows_are_faster_on_the_portable_kernel(sizes, is_slower):
    (spec,) = (spec for spec in selection.specs(OP) if spec.backend == "hopper")
    assert spec.why_slower is not None
    reason = spec.why_slower(problem(**{"rows": 30, **sizes}))
    assert (reason is not None) == is_slower


def operands(rows: int = 20) -> dict[str, torch.Tensor]:
    return {
        "a": torch.zeros(rows, 256).to(E4M3),
        "a_scale": torch.ones(2, rows),
        "b": torch.zeros(64, 256).to(E4M3),
        "b_scale": torch.ones(1, 2),
    }


UNALIGNED = {
    "rows of a": {"a": torch.zeros(20, 264).to(E4M3)[:, :256]},
    "start of b": {"b": torch.zeros(64, 272).to(E4M3)[:, 8:264]},
    "repeated a": {"a": torch.zeros(1, 256).to(E4M3).expand(20, 256)},
}


@pytest.mark.parametrize("changed", UNALIGNED.values(), ids=UNALIGNED.keys())
def test_tensors_that_tma_cannot_address(changed):
    with pretending(90), pytest.raises(UnsupportedError, match="takes no unaligned rows of a or b"):
        scaled_mm_fp8(**{**operands(), **changed}, backend="hopper")


@EVERY_CONFIG
def test_configs_fit_an_sm(config: ProductConfig):
    assert config.smem_bytes + OTHER_SMEM_BYTES <= SMEM_BYTES
    assert config.STAGES & (config.STAGES - 1) == 0
    assert 3 * 128 * config.MAX_REGISTERS <= REGISTERS
    shared_out = 2 * config.CONSUMER_REGISTERS + config.PRODUCER_REGISTERS
    assert shared_out <= 3 * config.MAX_REGISTERS


def test_names_of_configs_differ():
    assert len({config.name for config in CONFIGS}) == len(CONFIGS)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        (shape(1), "swapped 64x16"),
        (shape(17), "swapped 64x32"),
        (shape(MAX_SWAPPED_ROWS), "swapped 64x64"),
        (shape(MAX_SWAPPED_ROWS + 1), "128x64"),
        (shape(128, 24576, 1536), "128x128"),
        (shape(128), "128x64"),
        (shape(4096, 32768, 512), "256x128"),
        (shape(4096), "256x128"),
        (shape(4096, 4096, 4096), "256x128"),
        (shape(300, 512, 128, batch=128), "256x128"),
    ],
    ids=str,
)
def test_picked_tiles(product, name):
    assert pick_config(product, H200_SMS).name == name


def run(**fields: object) -> None:
    given = {"m": 30, "n": 200, "k": 400, "n_group": 128, "k_group": 128}
    ScaledMatmulCase(**{**given, **fields}).run("cuda", "hopper")


@pytest.mark.gpu
@pairwise(
    m=[1, 16, 17, 64, 65, 128, 129, 300],
    n=[1, 63, 64, 65, 200, 257],
    k=[16, 112, 128, 144, 256, 1040],
)
def test_sizes_around_tiles_and_steps(m, n, k):
    """Steps past the end of K, without a step for the second half of K, and each stage again."""
    run(m=m, n=n, k=k)


@pytest.mark.gpu
@pairwise(
    m=[9, 40, 100, 300],
    fields=[
        {"batch": 1},
        {"batch": 3},
        {"padded": True, "batch": 2},
        {"given_results": True, "padded": True},
        {"out_dtype": "e4m3"},
        {"spare_columns": 0},
        {"n_group": 256, "k_group": 256},
        {"n_group": 200, "k_group": 400},
        {"n_group": 2**40, "k_group": 2**40},
    ],
)
def test_forms_of_arguments(m, fields):
    run(m=m, **fields)


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{"m": 0}, {"n": 0}, {"m": 0, "batch": 2}], ids=str)
def test_no_rows(fields):
    run(**fields)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_random_products(seed):
    random_case(SeededDraw(seed), ScaledMatmulCase, "hopper").run("cuda", "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [20, 100, 200])
def test_products_per_head_of_a_tensor_with_the_tokens_outside(rows):
    """The matrices of a batch are a head apart, their rows all heads; so are the results."""
    heads, k, n = 3, 256, 130
    draw = Random(0)
    generator = torch.Generator().manual_seed(draw.randrange(1000))
    a = torch.randn(rows, heads, k, generator=generator).to(E4M3).cuda()
    b = torch.randn(heads, n, k, generator=generator).to(E4M3).cuda()
    a_scale = torch.rand(rows, heads, 2, generator=generator).cuda().permute(1, 2, 0)
    b_scale = torch.rand(heads, 2, 2, generator=generator).cuda()
    out = torch.full((rows, heads, n), 7.0, dtype=torch.bfloat16, device="cuda")
    scaled_mm_fp8(a.transpose(0, 1), a_scale, b, b_scale, out=out.transpose(0, 1), backend="hopper")
    wide_a = a.transpose(0, 1).double() * a_scale.mT.double().repeat_interleave(128, 2)
    wide_b = b.double() * b_scale.double().repeat_interleave(128, 1)[:, :n].repeat_interleave(
        128, 2
    )
    exact = (wide_a @ wide_b.mT).transpose(0, 1)
    torch.testing.assert_close(
        out.double(), exact, rtol=2**-7, atol=2e-3 * float(exact.abs().max())
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [20, 100, 200])
def test_a_nan_stays_in_its_row_and_column(rows):
    a = torch.randn(rows, 256).to(E4M3).cuda()
    b = torch.randn(150, 256).to(E4M3).cuda()
    a_scale, b_scale = torch.ones(2, rows, device="cuda"), torch.ones(2, 2, device="cuda")
    a.view(torch.uint8)[3, 200] = 0x7F
    b.view(torch.uint8)[140, 5] = 0x7F
    a_scale[1, 7] = torch.nan
    out = scaled_mm_fp8(a, a_scale, b, b_scale, backend="hopper")
    expected = torch.zeros(rows, 150, dtype=torch.bool)
    expected[[3, 7]] = expected[:, 140] = True
    assert torch.equal(out.isnan().cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [30, 300])
def test_the_same_bits_each_time(rows):
    case = ScaledMatmulCase(m=rows, n=300, k=1040, n_group=128, k_group=128)
    trial = case.trial("cuda")
    first, *others = (trial.call("hopper")[0].clone() for _ in range(3))
    assert all(torch.equal(first, other) for other in others)
