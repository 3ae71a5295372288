"""Which decode problems Hopper kernels take, and which kernel is chosen."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from mlakit import PagedLatentCache, mla_decode
from mlakit.dispatch import proofs, selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.specs import KernelSpec, Problem, Use, pretending
from mlakit.formats import row_codec
from mlakit.kernels.hopper.decode import configs
from mlakit.model.geometry import RowShape
from mlakit.ops.decode_plan import plan_mla_decode
from mlakit.plan import EvenSplit, plan_decode
from mlakit.tools.workloads import DecodeCase
from tests.kernels.hopper.decode_cases import (
    BF16_AND_FP8,
    FP8,
    FP8_FORMATS,
    ROW,
    SMALL_M_HEADS,
    kernel_for,
)


@pytest.mark.parametrize("requests", [0, 2])
def test_without_queries_no_kernel_is_started(requests):
    from mlakit.kernels.launch import SHARED_BYTES, Target, compiling

    cache = PagedLatentCache.allocate(RowShape(512, 64), num_pages=1, page_size=64)
    table, lens = torch.zeros(requests, 1).int(), torch.full((requests,), 3).int()
    starts = torch.zeros(requests + 1).int()
    q = torch.empty(0, 16, 576, dtype=torch.bfloat16)
    with compiling(Target(90, 132, SHARED_BYTES[90])) as compilation:
        out, lse = mla_decode(
            q, cache, table, lens, q_starts=starts, softmax_scale=0.1, backend="hopper"
        )
    assert (out.shape, lse.shape) == ((0, 16, 512), (0, 16))
    assert compilation.kernels == []


def problem(**fields: object) -> Problem:
    row = DecodeCase(**ROW).row
    given = {"dtype": "torch.bfloat16", "format": "bf16", "heads": 16, "page_size": 64, "row": row}
    return Problem("cuda", 90, **{**given, "mask": "causal", **fields})


E4M3 = "torch.float8_e4m3fn"
# a query token over a request that may have so many keys
MUCH_WORK = {"num_tokens": 1, "max_keys": 1 << 26, "num_sms": 132}
LITTLE_WORK = {"num_tokens": 1, "max_keys": 128, "num_sms": 132}


def kernel_of(**fields: object) -> str:
    return selection.select("mla_decode", problem(**fields)).kernel


@pytest.mark.parametrize(
    ("heads", "rows"),
    [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 32), (31, 32), (32, 32), (33, 64), (200, 64)],
)
def test_small_m_heads_are_not_padded_to_64(heads, rows):
    from mlakit.kernels.hopper.decode.launch import tiles_of

    kernel = kernel_of(heads=heads, **MUCH_WORK)
    assert kernel == ("small_m_bf16" if heads <= 32 else "m64_bf16")
    assert tiles_of(kernel, heads, 64).rows == rows
    kernel = kernel_of(heads=heads, **LITTLE_WORK)
    assert kernel == "small_m_bf16"
    assert tiles_of(kernel, heads, 64).rows == min(rows, 32)


@pytest.mark.parametrize("dtype", ["torch.bfloat16", E4M3])
@pytest.mark.parametrize(
    ("format", "heads", "is_m64"),
    [
        ("fp8", 32, False), ("fp8", 33, True), ("fp8_token", 128, True),
        ("fp8_block128", 32, False), ("fp8_block128", 128, True),
    ],
)  # fmt: skip
def test_fp8_kv_and_fp8_qk_have_m64_kernels(format, heads, is_m64, dtype):
    """fp8_block128 is converted: no GPU has timed products of e4m3 that are scaled per tile."""
    is_fp8_qk = dtype == E4M3 and format != "fp8_block128"
    m64 = "m64_fp8_qk" if is_fp8_qk else "m64_fp8_kv"
    given = {"format": format, "heads": heads, "dtype": dtype}
    assert kernel_of(**given, **MUCH_WORK) == (m64 if is_m64 else "small_m_fp8_kv")
    assert kernel_of(**given, **LITTLE_WORK) == "small_m_fp8_kv"


def test_the_work_up_to_which_small_m_is_chosen():
    """16 blocks of 32 heads x 64 keys per SM: 2112 on 132 SMs."""
    asked = problem(heads=128, num_tokens=33, num_sms=132)
    for max_keys, kernel in ((16 * 64, "small_m_bf16"), (16 * 64 + 1, "m64_bf16")):
        assert selection.select("mla_decode", replace(asked, max_keys=max_keys)).kernel == kernel
    slower = "is for more than 2112 blocks of 32 heads x 64 keys, got 2112"
    little = replace(asked, max_keys=16 * 64)
    assert selection.explain_kernels("mla_decode", little) == {
        "cpu": "needs CPU tensors, got cuda",
        "blackwell:n64_bf16": "needs sm_100 or sm_103, got sm_90",
        "blackwell:n64_fp8_kv": "needs sm_100 or sm_103, got sm_90",
        "hopper:m64_bf16": slower,
        "hopper:m64_fp8_qk": "needs rows of fp8 or fp8_token or fp8_block128, got bf16",
        "hopper:m64_fp8_kv": "needs rows of fp8 or fp8_token or fp8_block128, got bf16",
        "hopper:small_m_bf16": None,
        "hopper:small_m_fp8_kv": "needs rows of fp8 or fp8_token or fp8_block128, got bf16",
        "hopper:small_m_fp4_kv": "needs rows of mxfp4_block32, got bf16",
        "triton": None,
    }


@pytest.mark.parametrize("heads", [8, 32, 96])
def test_rows_of_256_latent_columns_wait_for_a_check_of_small_m(heads):
    name = "hopper:small_m_bf16"
    asked = problem(heads=heads, row=RowShape(256, 64), **MUCH_WORK)
    reasons = selection.explain_kernels("mla_decode", asked)
    assert reasons["hopper:m64_bf16"] == "needs rows of 576/512, got 320/256"
    assert "(no record): mlakit check --backend hopper enables it" in str(reasons[name])
    assert selection.select("mla_decode", asked).name == "triton"
    spec = selection.select("mla_decode", asked, name)
    tile = min(heads, 32)
    proof = f"mla_decode small_m_bf16: bf16 320/256, {tile} heads"
    assert proofs.configuration(spec, asked) == proof
    wide = problem(heads=heads, **MUCH_WORK)
    assert proofs.configuration(selection.select("mla_decode", wide, name), wide) == ""


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    ("dtype", "format"),
    [*(("bf16", format) for format in BF16_AND_FP8), *(("e4m3", format) for format in FP8)],
)
def test_every_kernel_can_be_asked_for_by_name(dtype, format, heads):
    names = {"bf16": "torch.bfloat16", "e4m3": E4M3}
    for work in (MUCH_WORK, LITTLE_WORK):
        asked = problem(format=format, heads=heads, dtype=names[dtype], **work)
        for m64 in (False, True):
            name = kernel_for(heads, format, dtype, m64=m64)
            assert selection.select("mla_decode", asked, name).name == name


@pytest.mark.parametrize(
    ("kernel", "fields", "reason"),
    [
        ("m64_bf16", {"format": "fp8"}, "needs rows of bf16 or fp16, got fp8"),
        ("m64_fp8_qk", {"format": "fp8"}, f"needs queries of {E4M3}, got torch.bfloat16"),
        (
            "m64_fp8_kv",
            {"format": "fp8", "dtype": E4M3},
            f"needs 16-bit queries with rows of fp8, got {E4M3}",
        ),
        (
            "m64_fp8_qk",
            {"format": "fp8_block128"},
            f"needs queries of {E4M3}, got torch.bfloat16",
        ),
        ("small_m_bf16", {"format": "fp8"}, "needs rows of bf16 or fp16, got fp8"),
        (
            "small_m_fp8_kv",
            {},
            "needs rows of fp8 or fp8_token or fp8_block128, got bf16",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_kernel_asked_for_by_name_says_what_it_cannot_take(kernel, fields, reason):
    asked = problem(**fields)
    assert selection.explain_kernels("mla_decode", asked)[f"hopper:{kernel}"] == reason
    with pytest.raises(UnsupportedError, match=f"\\n  hopper:{kernel}: {reason}$"):
        selection.select("mla_decode", asked, f"hopper:{kernel}")


def selected_in(call) -> list[KernelSpec]:
    """The kernels that calls of 128 heads over one page choose, before anything is launched."""
    from mlakit.kernels.launch import SHARED_BYTES, Target, compiling

    chosen: list[KernelSpec] = []

    def select(*args: object) -> KernelSpec:
        chosen.append(dispatch_select(*args))
        raise InterruptedError

    dispatch_select = selection.select
    with (
        mock.patch.object(selection, "select", select),
        compiling(Target(90, 132, SHARED_BYTES[90])),
        pytest.raises(InterruptedError),
    ):
        call()
    return chosen


def kernel_in_call(tokens: int = 1, **given: object) -> str:
    """Little work, with one token; much with 600."""
    cache = PagedLatentCache.allocate(RowShape(512, 64), num_pages=1, page_size=64)
    q = torch.empty(tokens, 128, 576, dtype=torch.bfloat16)
    table, lens = torch.zeros(tokens, 1).int(), torch.full((tokens,), 64).int()
    (spec,) = selected_in(
        lambda: mla_decode(q, cache, table, lens, softmax_scale=0.1, backend="hopper", **given)
    )
    return spec.kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"deterministic": True},
        {"plan": EvenSplit(2)},
        {"plan": plan_decode([64], num_ctas=1, fixed_split=64)},
    ],
    ids=["deterministic", "even split", "fixed split"],
)
def test_a_batch_invariant_request_has_one_kernel(given):
    """The same kernel runs for a request alone and in a batch: kernels differ in the last bits."""
    assert kernel_in_call() == "small_m_bf16"
    assert kernel_in_call(600) == "m64_bf16"
    assert kernel_in_call(**given) == "m64_bf16"


@pytest.mark.parametrize("heads", [16, 128])
def test_queries_whose_tokens_lie_together_are_not_left_to_the_portable_kernel(heads):
    cache = PagedLatentCache.allocate(RowShape(512, 64), num_pages=1, page_size=64)
    q = torch.empty(heads, 3, 576, dtype=torch.bfloat16).transpose(0, 1)
    table, lens = torch.zeros(3, 1).int(), torch.full((3,), 64).int()
    call = lambda: mla_decode(q, cache, table, lens, softmax_scale=0.1, backend="hopper")  # noqa: E731
    (spec,) = selected_in(call)
    assert spec.kernel == "small_m_bf16"


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 500, 600])
def test_a_plan_is_made_for_the_kernel_of_the_call(tokens):
    cache = PagedLatentCache.allocate(RowShape(512, 64), num_pages=1, page_size=64)
    table, lens = torch.zeros(tokens, 1).int(), torch.full((tokens,), 64).int()
    (spec,) = selected_in(lambda: plan_mla_decode(cache, table, lens, heads=128, backend="hopper"))
    assert spec.kernel == kernel_in_call(tokens)
    assert spec.kernel == ("m64_bf16" if tokens > 528 else "small_m_bf16")


@pytest.mark.parametrize("format", ["bf16", "fp8_token"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page_size", [1, 4, 8, 16, 24, 32, 64, 96, 192])
def test_rows_are_gathered_where_no_tma_tile_fits_a_page(page_size, heads, format):
    from mlakit.kernels.hopper.decode.launch import _cache_arguments, tiles_of

    row = RowShape(512, 64)
    layer = PagedLatentCache.allocate(row, format, num_pages=2, page_size=page_size).layer(0)
    kernel = kernel_of(heads=heads, format=format, page_size=page_size, **MUCH_WORK)
    tiles = tiles_of(kernel, heads, page_size)
    gather = _cache_arguments(kernel, layer, tiles, 1, 0, None).gather
    # with the smallest TMA tiles m64_bf16 would spill registers
    is_tma_page = page_size % 64 == 0 or page_size in (16, 32) or (
        page_size == 8 and kernel != "m64_bf16"
    )  # fmt: skip
    assert (gather.words is None) == is_tma_page
    if not is_tma_page:
        assert gather.row_chunks * 16 == {"bf16": 1152, "fp8_token": 640}[format]


def test_shared_memory_is_what_the_portable_kernels_know_of_it():
    from mlakit.kernels.launch import SHARED_BYTES

    assert SHARED_BYTES[90] == configs.SMEM_BYTES


@FP8_FORMATS
@SMALL_M_HEADS
@pytest.mark.parametrize("copied_columns", [0, 512, 576], ids=["16-bit", "bf16 rope", "e4m3"])
def test_fp8_stages_fill_what_the_queries_leave(copied_columns, heads, format):
    """Shared memory as compiled is checked by `support --compile`; here, that none is wasted."""
    traits = row_codec(format, RowShape(512, 64)).traits
    copies = configs.prob_copies(traits)
    rope_bytes = 64 * (64 if format == "fp8" else 128)
    config = configs.small_m_fp8_kv_config(
        heads,
        traits,
        rope_bytes=rope_bytes,
        copied_bytes=heads * copied_columns,
        is_gathered=False,
    )
    rope_bytes += 0 if format == "fp8" else (copies * 64 + 4) * 4  # scales go with them
    tiles = config.TILES_PER_STAGE * config.STAGES
    assert tiles >= 12  # two QK-softmax warpgroups need room for two blocks
    assert 4 * (config.ROPE_STAGES - 1) < tiles <= 4 * config.ROPE_STAGES
    taken = tiles * 8192 + config.ROPE_STAGES * rope_bytes
    taken += heads * (576 * 2 + copied_columns) + copies * heads * 64 * 2 * 2
    assert 3000 < 232_448 - taken < 4500 + config.TILES_PER_STAGE * 8192 + rope_bytes


@FP8_FORMATS
@SMALL_M_HEADS
@pytest.mark.parametrize("is_gathered", [False, True], ids=["TMA", "gather"])
def test_registers_of_warps_are_no_more_than_there_are(is_gathered, heads, format):
    """Spills as compiled are checked by `support --compile`; here, that PV has a share."""
    traits = row_codec(format, RowShape(512, 64)).traits
    config = configs.small_m_fp8_kv_config(
        heads, traits, rope_bytes=8192, copied_bytes=0, is_gathered=is_gathered
    )
    groups = config.PV_WARPGROUPS + 3  # two QK-softmax warpgroups and the producer's
    assert config.MAX_REGISTERS * groups * 128 <= configs.REGISTERS
    others = (config.PV_WARPGROUPS - 1) * config.PV_REGISTERS + 2 * config.SOFTMAX_REGISTERS
    first_pv = config.MAX_REGISTERS * groups - others - config.PRODUCER_REGISTERS
    least = min(first_pv, config.PV_REGISTERS) if config.PV_WARPGROUPS > 1 else first_pv
    # its acc, and values as words and as float16
    assert 4 * heads // config.PV_WARPGROUPS + 80 <= least <= first_pv <= 256
    shares = (config.SOFTMAX_REGISTERS, config.PRODUCER_REGISTERS, config.PV_REGISTERS, first_pv)
    assert all(registers % 8 == 0 for registers in shares)


@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize("is_gathered", [False, True], ids=["TMA", "gather"])
def test_m64_fp8_qk_has_its_stages_and_no_more_registers_than_there_are(is_gathered, format):
    config = configs.m64_fp8_qk_config(
        row_codec(format, RowShape(512, 64)).traits,
        rope_bytes=64 * 64 if format == "fp8" else 64 * 64 * 2,
        copied_bytes=64 * 576,
        is_gathered=is_gathered,
    )
    stages = 3 if format == "fp8_block128" else 4  # scales take room
    assert stages == config.STAGES
    # of the threads of four warpgroups
    shares = (config.PV_REGISTERS, config.SOFTMAX_REGISTERS, config.PRODUCER_REGISTERS)
    first_pv = 4 * config.MAX_REGISTERS - sum(shares)
    assert config.PV_REGISTERS <= first_pv <= 256
    assert 4 * config.MAX_REGISTERS * 128 <= configs.REGISTERS
    assert all(registers % 8 == 0 for registers in shares)


@pytest.mark.parametrize("page_size", [1, 4, 8, 16, 24, 32, 64, 96, 192])
@pytest.mark.parametrize("format", BF16_AND_FP8)
def test_hopper_is_the_first_choice(format, page_size):
    asked = problem(page_size=page_size, format=format)
    assert selection.select("mla_decode", asked).backend == "hopper"


@FP8_FORMATS
def test_hopper_is_the_first_choice_for_small_m_fp8_kv(format):
    assert selection.select("mla_decode", problem(format=format, heads=32)).backend == "hopper"


@FP8_FORMATS
@pytest.mark.parametrize("uses", [(), (Use.Q_SCALE,)], ids=["plain", "scaled"])
def test_hopper_is_the_first_choice_for_fp8_qk(uses, format):
    asked = problem(format=format, dtype="torch.float8_e4m3fn", heads=128, uses=uses)
    assert selection.select("mla_decode", asked).backend == "hopper"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"format": "fp32"},
            "needs rows of bf16 or fp16 or fp8 or fp8_token or fp8_block128, got fp32",
        ),
        (
            {"dtype": "torch.float16"},
            "needs queries of torch.bfloat16 with rows of bf16, got torch.float16",
        ),
        (
            {"dtype": "torch.float8_e4m3fn"},
            "needs queries of torch.bfloat16 with rows of bf16, got torch.float8_e4m3fn",
        ),
        (
            {"format": "fp8_token", "dtype": "torch.float16"},
            "needs queries of torch.bfloat16 or torch.float8_e4m3fn with rows of fp8_token, "
            "got torch.float16",
        ),
        ({"format": "fp8", "uses": (Use.Q_SCALE,)}, "takes no q_scale"),
        (
            {
                "format": "fp8_token",
                "dtype": "torch.float8_e4m3fn",
                "uses": (Use.Q_SCALE, Use.UNALIGNED_QUERY),
            },
            "takes no unaligned rows of q: no TMA descriptor can address them",
        ),
        ({"row": DecodeCase().row}, "needs rows of 576/512, got 40/32"),
        # tiles of queries end at column 512
        ({"row": RowShape(520, 56, 512)}, "needs 512 + 64 columns, got 520 + 56"),
        ({"mask": "chunked"}, "needs a mask of null or causal, got chunked"),
        ({"uses": (Use.KV_SHARD,)}, "takes no kv_shard"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_problems_that_are_left_to_the_portable_kernel(fields, reason):
    asked = problem(**fields)
    assert selection.explain("mla_decode", asked)["hopper"] == reason
    assert selection.select("mla_decode", asked).backend == "triton"


def test_hopper_kernels_need_sm_90():
    for where, got in ((("cuda", 100), "sm_100"), (("cpu", 0), "cpu")):
        asked = Problem(*where, dtype="torch.bfloat16", format="bf16")
        assert selection.explain("mla_decode", asked)["hopper"] == f"needs sm_90, got {got}"


def test_rows_that_tma_cannot_address_are_said_to_be_unaligned():
    from mlakit.ops._checks import is_uniformly_strided

    rows = torch.zeros(4, 6, 64, dtype=torch.bfloat16)
    assert is_uniformly_strided(rows)
    assert is_uniformly_strided(rows[:, ::2])
    assert is_uniformly_strided(rows[::2])
    assert not is_uniformly_strided(rows.flatten()[1:-63].view(-1, 64)[:6].view(2, 3, 64))
    assert not is_uniformly_strided(rows.as_strided((2, 3, 8), (100, 12, 1)))
    assert not is_uniformly_strided(rows.as_strided((2, 3, 8), (40, 16, 1)))
    assert not is_uniformly_strided(rows[:, :1].expand(4, 6, 64))


def test_pages_of_one_row_are_addressed_by_the_page_stride():
    from mlakit.kernels.hopper.pool_rows import pool_rows
    from mlakit.ops._checks import is_uniformly_strided

    pool = torch.arange(4 * 72.0).to(torch.bfloat16).view(4, 72)[:, :64]
    pages = pool.unsqueeze(1)
    assert pages.stride(1) == 64  # at which there is no row
    assert is_uniformly_strided(pages)
    rows, apart = pool_rows(pages)
    assert apart == 1
    assert torch.equal(rows, pool)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        *(
            ({"q_rope_dtype": other}, "q_rope of another dtype")
            for other in ("fp16", "fp32", "e4m3")
        ),
        ({"dtype": "e4m3", "format": "fp8", "q_rope_dtype": "bf16"}, "bf16 q_rope of e4m3 q"),
        (
            {"dtype": "e4m3", "format": "fp8_token", "q_rope_dtype": "fp16"},
            "q_rope of another dtype",
        ),
        ({"format": "fp8_token", "q_scaled": True}, "q_scale"),
    ],
    ids=str,
)
def test_query_forms_that_are_left_to_the_portable_kernel(fields, words):
    trial = DecodeCase(**ROW, page_size=64, **fields).trial("cpu")
    with pretending(90), pytest.raises(UnsupportedError, match=f"takes no {words}"):
        trial.call("hopper")
