"""Blackwell's kernels in the emulator: right results, and no fault in any interleaving."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch

from mlakit.tools.compile.configurations import BLACKWELL, BLACKWELL_ARCHS
from mlakit.tools.emulator import harness
from mlakit.tools.testing import assert_matches

pytest.importorskip("triton", minversion="3.9", reason="Blackwell's kernels need Triton 3.9")
SAMPLE = (
    "blackwell-sparse-h128-bf16",
    "blackwell-sparse-h64-bf16",
    "blackwell-sparse-h64-fp8_block128",
    "blackwell-decode-h64-bf16",
    "blackwell-decode-h64-fp8_block128",
    "blackwell-prefill-192-128",
    "blackwell-prefill-256-256",
    "blackwell-prefill-fp8",
    "blackwell-indexer-h64-q1",
    "blackwell-indexer-h64-q4",
)  # one of each kernel, prefill with one and with two query tiles, the indexer with a part of a key
# tile for each warpgroup and with one for both
ROW = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_kernel_has_no_fault(name, in_emulator):
    outcome, shared = in_emulator(emulate_and_allocate, name)
    assert outcome.passed, str(outcome)
    # the emulator has a memory of its own for each allocation
    assert shared == [], "Triton gives two allocations the same memory"


def emulate_and_allocate(name: str) -> tuple[harness.Outcome, list[str]]:
    """Run a configuration; return which allocations of its Gluon kernels share memory, too."""
    from tests.tools.emulator.allocations import shared_by_two  # not in the process of the tests

    found: list[str] = []

    def allocate(kernel: str, text: str) -> str:
        if "warp_specialize" in text:
            found.extend(shared_by_two(text, BLACKWELL_ARCHS[0]))
        return text

    return harness.emulate(name, 0, mutate=allocate), found


@pytest.mark.emulated
@pytest.mark.parametrize("name", BLACKWELL)
def test_no_configuration_has_a_fault(name, in_emulator):
    """With one seed; `make emulate-all` has five, and docs/data/emulated.json records them."""
    outcome = in_emulator(harness.emulate, name, 1)
    assert outcome.passed, str(outcome)


def fewest_keys(heads: int) -> harness.Outcome:
    """Run tokens whose lists have no block, one, or two, and a token whose entries are invalid."""
    from mlakit.tools.workloads import SparseCase

    given = {"dtype": "bf16", "page_size": 1, "num_pages": 80, "num_tokens": 4, **ROW}
    trial = SparseCase(**given, heads=heads, topk=130, sink="mixed").trial("cpu")
    return harness.run_trial(trial, "few keys", 0, backend="blackwell")


@pytest.mark.parametrize("heads", [3, 70])
def test_short_lists_and_pages_of_one_row(heads, in_emulator):
    outcome = in_emulator(fewest_keys, heads)
    assert outcome.passed, str(outcome)


LENGTHS: tuple[dict[str, Any], ...] = (
    {"kv_lens": (0, 0), "q_lens": (1, 1)},
    {"kv_lens": (130, 64, 5), "q_lens": (3, 0, 5), "sink": "mixed"},
    {
        "kv_lens": (0, 270, 1),
        "q_lens": (1, 1, 1),
        "page_size": 3,
        "num_splits": 2,
        "implicit_starts": True,
    },
    {"kv_lens": (300, 128), "q_lens": (1, 1), "page_size": 128, "mask": "null"},
    {"kv_lens": (0, 300, 1, 129), "q_lens": (1, 3, 1, 0), "format": "fp8_block128"},
    # one CTA has all work tiles
    {"kv_lens": (1, 0, 129, 128, 3), "q_lens": (1,) * 5, "num_ctas": 1, "tile": 64},
)


def decode(lengths: dict[str, Any]) -> harness.Outcome:
    """Run requests of some lengths, with more heads than one tile has."""
    from mlakit.tools.workloads import DecodeCase

    given = {"heads": 70, "dtype": "bf16", "page_size": 64, **ROW, **lengths}
    trial = DecodeCase(**given).trial("cpu")
    return harness.run_trial(trial, str(lengths), 0, backend="blackwell")


@pytest.mark.emulated
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_decode_of_requests_of_any_length(lengths, in_emulator):
    outcome = in_emulator(decode, lengths)
    assert outcome.passed, str(outcome)


def pages_with_gaps(first: int, topk: int, kernel: str) -> tuple[Any, Any]:
    """Return the results of a layer whose pages have those of two others between them, and what the
    oracle says."""
    from mlakit import PagedLatentCache, reference, sparse_mla
    from mlakit.model.geometry import RowShape
    from mlakit.tools.emulator.frontend import emulating_mlakit

    generator = torch.Generator().manual_seed(3)
    pages = torch.full((9, 1, 3, 8, 1, 576), torch.nan, dtype=torch.bfloat16)
    own = torch.randn(9, 8, 576, generator=generator).bfloat16()
    own[first:] = torch.nan
    pages[:, 0, 1, :, 0] = own
    cache = PagedLatentCache.wrap(pages, RowShape(512, 64), format="bf16")
    q = torch.randn(2, 5, 576, generator=generator).bfloat16()
    rows = torch.randint(0, 8 * first, (2, topk), generator=generator, dtype=torch.int32)
    rows[:, ::3] = -1
    with emulating_mlakit(arch=BLACKWELL_ARCHS[0]):
        results = sparse_mla(
            q, cache, rows, layer=1, softmax_scale=0.1, backend=f"blackwell:{kernel}"
        )
    expected = reference.sparse_mla(
        q.double(), own.view(-1, 576).double(), rows, softmax_scale=0.1, v_width=512
    )
    return results, expected


@pytest.mark.parametrize("kernel", ["m128_bf16", "n64_bf16"])
def test_rows_of_a_layer_with_others_between_its_pages(kernel, in_emulator):
    results, expected = in_emulator(pages_with_gaps, 7, 70, kernel)
    for result, exact, bound in zip(results, expected, (1e-2, 1e-4, 1e-4), strict=True):
        torch.testing.assert_close(result.double(), exact, atol=bound, rtol=1e-2)


PREFILLS: tuple[dict[str, Any], ...] = (
    {"kv_lens": (0, 0), "q_lens": (3, 200)},
    {"kv_lens": (127, 128, 257), "q_lens": (127, 128, 257), "sharpness": 0.0},
    {"kv_lens": (0, 300, 77, 0, 40), "q_lens": (0, 300, 0, 9, 40), "sink": "mixed"},
    {"kv_lens": (1025, 640), "q_lens": (1, 1), "sharpness": 30.0},
    {"kv_lens": (90, 130, 1), "q_lens": (140, 300, 129), "mask": "null", "expanded": True},
    {"kv_lens": (500, 130), "q_lens": (200, 130), "mask": "chunked", "window": 50, "padded": True},
    {"kv_lens": (600, 5), "q_lens": (400, 5), "sharpness": -2.0, "given_results": True},
)
WIDTHS = ((128, 64, 128), (192, 64, 256), (128, 0, 128))


def widths_of(d_n: int, d_r: int, d_v: int) -> dict[str, int]:
    return {"qk_nope_head_dim": d_n, "qk_rope_head_dim": d_r, "v_head_dim": d_v}


def prefill(widths: tuple[int, int, int], given: dict[str, Any]) -> harness.Outcome:
    from mlakit.tools.workloads import PrefillCase

    trial = PrefillCase(heads=2, **widths_of(*widths), **given).trial("cpu")
    return harness.run_trial(trial, str(given), 0, backend="blackwell")


# each length with one of the widths, to save minutes
@pytest.mark.emulated
@pytest.mark.parametrize(
    ("widths", "given"), [*zip(cycle(WIDTHS), PREFILLS, strict=False)], ids=str
)
def test_prefill_of_requests_of_any_length(widths, given, in_emulator):
    outcome = in_emulator(prefill, widths, given)
    assert outcome.passed, str(outcome)


PREFILLS_FP8: tuple[dict[str, Any], ...] = (
    {"kv_lens": (0, 300, 77, 0, 40), "q_lens": (3, 300, 0, 9, 40), "sink": "mixed"},
    {"kv_lens": (1025, 640), "q_lens": (1, 1), "sharpness": 30.0, "seed": 1},
    {"kv_lens": (90, 130, 1), "q_lens": (140, 300, 129), "mask": "null", "qk_rope_head_dim": 0},
    {"kv_lens": (500, 130), "q_lens": (200, 130), "mask": "chunked", "window": 50, "padded": True},
    {"kv_lens": (600, 5), "q_lens": (400, 5), "sharpness": 0.0, "given_results": True},
)


def prefill_fp8(given: dict[str, Any]) -> harness.Outcome:
    from mlakit.tools.workloads import PrefillFp8Case

    named = {**widths_of(128, 64, 128), "heads": 2, "transposed": False, "block_scales": True}
    trial = PrefillFp8Case(**{**named, **given}).trial("cpu")
    return harness.run_trial(trial, str(given), 0, backend="blackwell")


@pytest.mark.emulated
@pytest.mark.parametrize("given", PREFILLS_FP8, ids=str)
def test_fp8_prefill_of_requests_of_any_length(given, in_emulator):
    outcome = in_emulator(prefill_fp8, given)
    assert outcome.passed, str(outcome)


def scales_that_are_not_finite(mask: tuple[str, int]) -> Any:
    """Return the results, and what the oracle says."""
    from mlakit import mla_prefill, reference
    from mlakit.model.masks import Mask
    from mlakit.tools.emulator.frontend import emulating_mlakit

    starts = [0, 300, 429], [0, 520, 649]
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        for shape in ((429, 2, 192), (649, 2, 128), (649, 64), (649, 2, 128))
    ]
    bits = tensors[3].view(torch.uint8)
    bits[60, 0, 3], bits[260, 1, 2], bits[391, 1, 2], bits[600, 0, 127] = 0x7F, 0xFF, 0x7F, 0x7F
    k_scale, v_scale = torch.ones(7), torch.full((7, 2), -0.5)
    # blocks of keys from 256 on, and from 384 on, of the first request; then of the second
    k_scale[2], v_scale[3, 0], v_scale[5, 1] = torch.nan, torch.inf, torch.nan
    given: dict[str, Any] = {
        "softmax_scale": 0.05,
        "mask": Mask(*mask),
        "k_scale": k_scale,
        "v_scale": v_scale,
        "keys_per_scale": 128,
    }
    exact = reference.mla_prefill(*tensors, *starts, **given)
    with emulating_mlakit(arch=BLACKWELL_ARCHS[0]):
        offsets = (torch.tensor(each, dtype=torch.int32) for each in starts)
        results = mla_prefill(*tensors, *offsets, **given, backend="blackwell")
    return results, exact


@pytest.mark.emulated
@pytest.mark.parametrize("mask", [("causal",), ("null",), ("sliding_window_causal", 333)], ids=str)
def test_fp8_values_and_scales_that_are_not_finite_reach_the_queries_that_see_them(
    mask, in_emulator
):
    results, exact = in_emulator(scales_that_are_not_finite, mask)
    assert exact[0].isnan().any()
    assert exact[1].isnan().any()
    for result, want in zip(results, exact, strict=True):
        torch.testing.assert_close(result.double(), want, atol=3e-2, rtol=3e-2, equal_nan=True)


def values_that_are_not_finite(widths: tuple[int, int, int], mask: tuple[str, int]) -> Any:
    """Return the results, what the oracle says, and what it says in float32."""
    from mlakit import mla_prefill, reference
    from mlakit.model.masks import Mask
    from mlakit.tools.emulator.frontend import emulating_mlakit

    d_n, d_r, d_v = widths
    starts = [0, 300, 429], [0, 520, 649]
    generator = torch.Generator().manual_seed(0)
    q, k_nope, k_rope, v = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((429, 2, d_n + d_r), (649, 2, d_n), (649, d_r), (649, 2, d_v))
    )
    v[60, 0, 3], v[260, 1, 2], v[391, 1, 2] = torch.nan, torch.inf, torch.nan
    v[400, 1], v[519, 0, 0], v[600, 0, d_v - 1] = -torch.inf, torch.inf, torch.nan
    k_nope[300, 1, 0] = torch.nan
    given: dict[str, Any] = {"softmax_scale": 0.1, "mask": Mask(*mask)}
    exact = reference.mla_prefill(q, k_nope, k_rope, v, *starts, **given)
    naive = reference.mla_prefill(q, k_nope, k_rope, v, *starts, **given, dtype=torch.float32)
    with emulating_mlakit(arch=BLACKWELL_ARCHS[0]):
        tensors = (torch.tensor(each, dtype=torch.int32) for each in starts)
        results = mla_prefill(q, k_nope, k_rope, v, *tensors, **given, backend="blackwell")
    return results, exact, naive


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("widths", "mask"),
    [*zip(WIDTHS, [("sliding_window_causal", 333), ("causal",), ("null",)], strict=True)],
    ids=str,
)
def test_values_that_are_not_finite_reach_exactly_the_queries_that_see_them(
    widths, mask, in_emulator
):
    results, exact, naive = in_emulator(values_that_are_not_finite, widths, mask)
    assert exact[0].isnan().any()
    for name, result, want, plain in zip(("out", "lse"), results, exact, naive, strict=True):
        assert_matches(name, result, want, plain)


INDEX_LENGTHS: tuple[dict[str, Any], ...] = (
    {"kv_lens": (0, 0), "q_lens": (1, 3)},
    {"kv_lens": (127, 128, 129, 255, 256, 257, 1), "q_lens": (1,) * 7, "spare_columns": 9000},
    {"kv_lens": (130, 64, 3, 700), "q_lens": (3, 0, 3, 2), "mask": "null", "page_size": 192},
    {"kv_lens": (300, 70, 129), "q_lens": (9, 40, 1), "spare_columns": None},
    {"kv_lens": (600,), "q_lens": (4,), "mask": "null", "given_results": True},
    {"kv_lens": (0,), "q_lens": (1,)},
    {"kv_lens": (900, 5), "q_lens": (1, 1), "implicit_starts": True, "num_layers": 2},
)


def logits(heads: int, given: dict[str, Any]) -> harness.Outcome:
    from mlakit.tools.workloads import IndexerLogitsCase

    row = {"kv_lora_rank": 128, "qk_rope_head_dim": 0, "page_size": 64, "format": "fp8_token"}
    trial = IndexerLogitsCase(**{**row, **given}, heads=heads, dtype="e4m3").trial("cpu")
    return harness.run_trial(trial, str(given), 0, backend="blackwell")


@pytest.mark.emulated
@pytest.mark.parametrize("given", INDEX_LENGTHS, ids=str)
@pytest.mark.parametrize("heads", [3, 64])
def test_logits_of_requests_of_any_length(heads, given, in_emulator):
    outcome = in_emulator(logits, heads, given)
    assert outcome.passed, str(outcome)


def logits_that_are_not_numbers(tokens: int) -> Any:
    """Return logits with a NaN in a key and in a query of the second token, and those without."""
    from mlakit import PagedLatentCache, indexer_logits
    from mlakit.tools.emulator.frontend import emulating_mlakit

    generator = torch.Generator().manual_seed(0)
    pages = torch.randint(0, 120, (4, 64 * 132), generator=generator, dtype=torch.uint8)
    pages[:, 64 * 128 :] = torch.rand(4, 64, generator=generator).view(torch.uint8)  # scales
    q = torch.randn(tokens, 3, 128, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.rand(tokens, 3, generator=generator)
    table, kv_lens = torch.tensor([[2, 0, 3]]).int(), torch.tensor([150]).int()
    starts = torch.tensor([0, tokens]).int()

    def run() -> torch.Tensor:
        cache = PagedLatentCache.wrap_index_keys(pages.view(4, 64, 132))
        with emulating_mlakit(arch=BLACKWELL_ARCHS[0]):
            return indexer_logits(
                q, weights, cache, table, kv_lens, q_starts=starts, backend="blackwell"
            )

    finite = run()
    pages[0, 6 * 128 + 5] = 0x7F  # of key 70, a NaN of e4m3
    q[1, 0, 0] = torch.nan
    return run(), finite


@pytest.mark.parametrize("tokens", [2, 9])
def test_a_nan_reaches_exactly_the_logits_of_its_key_and_its_token(tokens, in_emulator):
    logits, finite = in_emulator(logits_that_are_not_numbers, tokens)
    expected = finite.clone()
    expected[:, 70] = expected[1] = torch.nan
    expected = torch.where(finite == -torch.inf, finite, expected)
    assert finite[:, :140].isfinite().all()
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)
