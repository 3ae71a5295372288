"""The figures of the pages are those of the data files, and speeds are what their times give."""

from __future__ import annotations

import json
import re
from statistics import median

import pytest

from tests.docs.snippets import table
from tests.paths import ROOT

MEASURED = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
SPEED = re.compile(r"(\d+(?:\.\d+)?)x (faster|slower)")


def times(file: str) -> dict[str, dict[str, float]]:
    """Medians in microseconds: workload → implementation → us."""
    report = json.loads((ROOT / "docs" / "data" / file).read_text(encoding="utf-8"))
    found: dict[str, dict[str, float]] = {}
    for row in report["rows"]:
        found.setdefault(row["workload"], {})[row["implementation"]] = row["p50_us"]
    return found


def section(heading: str) -> str:
    _, _, rest = MEASURED.partition(f"# {heading}\n")
    assert rest, heading
    return re.split(r"^#+ ", rest, flags=re.MULTILINE)[0]


def workload(cell: str) -> str:
    batch, heads, q_len, tokens = cell.split(", ")
    new_tokens = "" if q_len == "1" else f"-q{q_len}"
    return f"decode-bf16-b{batch}-h{heads}{new_tokens}-{tokens}"


DECODE = times("h200-decode.json")
HOST = times("h200-decode-host.json")
GRID = times("h200-grid.json")
SPARSE = times("h200-sparse-prefill.json")
INDEXER = times("h200-indexer.json")
SPARSE_DECODE = times("h200-sparse-decode.json")
SPARSE_STEP = times("h200-sparse-step.json")
BRANCH = times("h200-branch.json")
FP8_PRODUCTS = times("h200-fp8.json")
LAYER = times("h200-layer.json")
PREFILL = times("h200-prefill.json")
PREFILL_FP8 = times("h200-prefill-fp8.json")
LONG_CONTEXT = times("h200-long-context.json")
VLLM = times("h200-vllm.json")
PLUGIN_ROWS = ("mlakit", "flash_mla", "fa3")
PREFILL_GRID = times("h200-prefill-grid.json")
TRANSFORMERS = times("h200-transformers.json")


def speed(theirs: float, ours: float) -> str:
    return f"{theirs / ours:.2f}x faster" if theirs >= ours else f"{ours / theirs:.2f}x slower"


def us(time: float) -> str:
    return f"{time:.0f}" if time >= 100 else f"{time:.1f}"


@pytest.mark.parametrize("row", table(section("H200: decode"), "b, h, q_len, tokens"))
def test_decode_times_are_those_of_the_data(row):
    measured = DECODE[workload(row[0])]
    shown = [f"{measured[name]:.1f}" for name in ("mlakit", "flash_mla", "fa3")]
    speeds = [f"{measured[peer] / measured['mlakit']:.2f}x faster" for peer in ("flash_mla", "fa3")]
    assert row[1:6] == [*shown, *speeds]


@pytest.mark.parametrize("row", table(section("H200: sparse prefill"), "h, tokens"))
def test_sparse_prefill_times_are_those_of_the_data(row):
    heads, tokens = row[0].split(", ")
    measured = SPARSE[f"sparse-prefill-bf16-b1-h{heads}-q4096-{tokens}-top2048"]
    peers = ("flash_mla", "fa3")
    shown = [f"{measured[name]:.0f}" for name in ("mlakit", *peers)]
    speeds = [f"{measured[peer] / measured['mlakit']:.2f}x faster" for peer in peers]
    assert row[1:6] == [*shown, *speeds]


@pytest.mark.parametrize("row", table(section("H200: sparse decode"), "b, h, q_len"))
def test_sparse_decode_times_are_those_of_the_data(row):
    batch, heads, q_len = row[0].split(", ")
    new_tokens = "" if q_len == "1" else f"-q{q_len}"
    name = f"sparse-decode-fp8_block128-b{batch}-h{heads}{new_tokens}-32768-top2048"
    measured = SPARSE_DECODE[name]
    shown = [us(measured[name]) for name in ("mlakit", "flash_mla", "eager")]
    assert row[1:5] == [*shown, speed(measured["flash_mla"], measured["mlakit"])]


@pytest.mark.parametrize("row", table(section("H200: dense prefill"), "b, h, s, mask"))
def test_prefill_times_are_those_of_the_data(row):
    batch, heads, tokens, mask = row[0].split(", ")
    measured = PREFILL[f"prefill-bf16-b{batch}-h{heads}-{tokens}-{mask}"]
    shown = [us(measured[name]) for name in ("mlakit", "fa3", "sdpa")]
    speeds = [speed(measured[peer], measured["mlakit"]) for peer in ("fa3", "sdpa")]
    assert row[1:6] == [*shown, *speeds]


@pytest.mark.parametrize("row", table(section("H200: a model of transformers"), "model")[:2])
def test_times_of_patched_models_are_those_of_the_data(row):
    measured = TRANSFORMERS[f"transformers-{row[0].removeprefix('DeepSeek-').lower()}-b8-h128-8192"]
    names = ("mlakit", "mlakit, CUDA graph", "eager", "sdpa")
    assert [float(cell) * 1e3 for cell in row[1:5]] == [
        pytest.approx(measured[name], rel=0.005) for name in names
    ]
    assert row[5:] == [speed(measured["eager"], measured[name]) for name in names[:2]]


@pytest.mark.parametrize("row", table(section("Prefill, e4m3"), "b, h, s, mask, scales"))
def test_times_of_e4m3_prefill_are_those_of_the_data(row):
    batch, heads, tokens, mask, scales = row[0].split(", ")
    suffix = "" if scales == "token" else f"-{scales}"
    measured = PREFILL_FP8[f"prefill-fp8-b{batch}-h{heads}-{tokens}-{mask}{suffix}"]
    own, bf16 = measured["mlakit"], measured["mlakit bf16"]
    assert row[1:] == [us(own), us(bf16), speed(bf16, own)]


@pytest.mark.parametrize("row", table(section("Prefill: a grid of shapes"), "mask, s"))
def test_the_prefill_grid_is_that_of_the_data(row):
    mask, tokens = row[0].split(", ")
    batch = max(1, 16384 // int(tokens))
    for cell, heads in zip(row[1:], (8, 16, 64, 128), strict=True):
        measured = PREFILL_GRID[f"prefill-grid-bf16-b{batch}-h{heads}-{tokens}-{mask}"]
        assert cell == speed(min(measured["fa3"], measured["sdpa"]), measured["mlakit"])


@pytest.mark.parametrize("row", table(section("H200: a step of DeepSeek-V3.2"), "b, tokens"))
def test_sparse_step_times_are_those_of_the_data(row):
    batch, tokens = row[0].split(", ")
    measured = SPARSE_STEP[f"sparse-step-fp8_block128-b{batch}-h128-{tokens}-top2048"]
    stages = ("absorb", "append", "logits", "top-k", "attend", "up-project", "read same bytes")
    assert row[1:] == [us(measured[name]) for name in ("mlakit", *stages)]


@pytest.mark.parametrize("row", table(section("H200: whole steps"), "b, h, q_len, tokens, cache"))
def test_times_of_whole_steps_are_those_of_the_data(row):
    batch, heads, q_len, tokens, format = row[0].split(", ")
    new_tokens = "" if q_len == "1" else f"-q{q_len}"
    measured = BRANCH[f"step-{format}-b{batch}-h{heads}{new_tokens}-{tokens}"]
    names = ("mlakit", "GEMMs + attention", "GEMMs alone", "attention alone")
    shown = [us(measured[name]) for name in names]
    assert row[1:] == [*shown, speed(measured["GEMMs + attention"], measured["mlakit"])]


@pytest.mark.parametrize("row", table(section("H200: FP8 products"), "rows, columns, K"))
def test_times_of_fp8_products_are_those_of_the_data(row):
    measured = FP8_PRODUCTS["scaled-mm-" + row[0].replace(", ", "x")]
    names = ("mlakit", "bf16 matmul", "torch scaled_mm", "deep_gemm")
    shown = [us(measured[name]) if name in measured else "" for name in names]
    speeds = [
        speed(measured[name], measured["mlakit"]) if name in measured else "" for name in names[1:]
    ]
    assert row[1:] == [*shown, *speeds]


@pytest.mark.parametrize("row", table(section("H200: a layer"), "layer, b, h, tokens"))
def test_layer_times_are_those_of_the_data(row):
    model, batch, heads, tokens = row[0].split(", ")
    names = ("mlakit", "GEMMs in a row", "read same bytes")
    shown = [
        us(LAYER[f"layer-{model}-{weights}-weights-b{batch}-h{heads}-{tokens}"][name])
        for weights in ("bf16", "fp8")
        for name in names
    ]
    assert row[1:] == shown


@pytest.mark.parametrize("row", table(section("H200: prefill over a long context"), "b, h, tokens"))
def test_long_context_times_are_those_of_the_data(row):
    batch, heads, tokens = row[0].split(", ")
    measured = LONG_CONTEXT[f"long-context-bf16-b{batch}-h{heads}-q2048-{tokens}"]
    per_token = measured["mlakit"] / int(batch) / int(tokens)
    step, *parts = (
        f"{measured[name] / 1e3:.2f}" for name in ("mlakit", "GEMMs alone", "attention alone")
    )
    assert row[1:] == [step, f"{per_token * 1024:.0f}", *parts]


def test_times_of_the_vllm_plugin_are_those_of_the_data():
    rows = table(section("H200: calls of the vLLM plugin"), "call")
    for row, measured in zip(rows, VLLM.values(), strict=True):
        shown = [us(measured[name]) if name in measured else "" for name in PLUGIN_ROWS]
        speeds = [
            speed(measured[peer], measured["mlakit"]) if peer in measured else ""
            for peer in PLUGIN_ROWS[1:]
        ]
        assert row[1:] == [*shown, *speeds]


@pytest.mark.parametrize("row", table(section("H200: indexer scores"), "b, q_len, keys"))
def test_indexer_times_are_those_of_the_data(row):
    batch, q_len, keys = row[0].split(", ")
    new_tokens = "" if q_len == "1" else f"-q{q_len}"
    measured = INDEXER[f"indexer-logits-b{batch}-h64{new_tokens}-{keys}"]
    shown = [f"{measured[name]:.1f}" for name in ("mlakit", "deep_gemm")]
    assert row[1:4] == [*shown, speed(measured["deep_gemm"], measured["mlakit"])]


@pytest.mark.parametrize("row", table(section("indexer_topk"), "rows x columns"))
def test_topk_times_are_those_of_the_data(row):
    measured = INDEXER[f"indexer-topk-{row[0].replace(' ', '')}-k2048"]
    names = ("mlakit", "torch.topk", "torch.topk, unsorted", "read same bytes")
    shown = [us(measured[name]) for name in names]
    assert row[1:6] == [*shown, speed(measured["torch.topk"], measured["mlakit"])]


@pytest.mark.parametrize("row", table(section("Host time of a call"), "b, h, q_len, tokens"))
def test_host_times_are_those_of_the_data(row):
    measured = HOST[workload(row[0])]
    names = (
        "mlakit",
        "planned in the call",
        "mlakit, graph replay",
        "flash_mla",
        "fa3",
        "empty kernel",
    )
    assert row[1:7] == [f"{measured[name]:.1f}" for name in names]
    assert row[7] == f"{measured['flash_mla'] / measured['mlakit']:.2f}x faster"


def against_the_faster_peer() -> list[float]:
    return [min(each["flash_mla"], each["fa3"]) / each["mlakit"] for each in GRID.values()]


def test_the_grid_is_summed_up_rightly():
    speeds = against_the_faster_peer()
    text = " ".join(section("A grid of shapes").split())
    assert f"{len(speeds)} shapes" in text
    assert f"{max(speeds):.2f}x faster at best" in text
    assert f"{1 / min(speeds):.2f}x slower at worst" in text
    faster = sum(speed >= 1 for speed in speeds)
    assert f"faster or equal on {faster} of {len(speeds)} shapes" in text
    assert f"the median is {median(speeds):.2f}x faster" in text


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Every table as its header and its rows."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        header, _, *rows = (
            [cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()
        )
        found.append((header, rows))
    return found


# the column of times that "against …" means, where it has another name
COLUMNS = {"bf16": "bf16 cache", "that": "separate torch.compile"}
OURS = re.compile(r"us|with a plan|.*\bmlakit\b.*")


def last_column(header: list[str], end: int, matches) -> int:
    return max(column for column in range(end) if matches(header[column]))


def first_number(cell: str) -> float:
    return float(re.findall(r"\d+(?:\.\d+)?", cell)[0])


def wrong_speeds(text: str) -> list[str]:
    """Speeds in columns "against …" that the times in their row do not give within 3 %: some are
    medians of the rounds' own ratios, which differ a little from the quotient of two medians."""
    wrong = []
    for header, rows in tables(text):
        for column, title in enumerate(header):
            if not title.startswith("against ") or not SPEED.search(rows[0][column]):
                continue
            name = title.removeprefix("against ")
            name = COLUMNS.get(name, name)
            theirs = last_column(header, column, lambda cell, n=name: cell.split(",")[0] == n)
            ours = last_column(header, column, lambda cell: OURS.fullmatch(cell))
            for row in rows:
                if not row[column]:
                    continue
                speed, direction = SPEED.search(row[column]).groups()
                quotient = first_number(row[theirs]) / first_number(row[ours])
                expected = quotient if direction == "faster" else 1 / quotient
                if abs(float(speed) / expected - 1) > 0.03:
                    wrong.append(f"{row[0]}: {row[column]} where times give {expected:.2f}")
    return wrong


def test_speeds_are_those_of_the_times_beside_them():
    assert wrong_speeds(MEASURED) == []


def test_the_checker_of_speeds_sees():
    head = "| b | mlakit, us | FA3, us | against FA3 |\n|---|---|---|---|\n"
    assert wrong_speeds(head + "| 1 | 10 | 12 | 1.20x faster |\n") == []
    assert len(wrong_speeds(head + "| 1 | 10 | 12 | 1.30x faster |\n")) == 1
    assert len(wrong_speeds(head + "| 1 | 10 | 12 | 1.20x slower |\n")) == 1


def test_no_speed_is_a_ratio_below_one():
    assert re.findall(r"\b0\.\d+x\b", MEASURED) == []


def test_most_tables_have_speeds():
    assert len([each for each, _ in tables(MEASURED) if "against" in " ".join(each)]) >= 11


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_shows_rows_of_the_measured_table():
    measured = [row[:6] for row in table(section("H200: decode"), "b, h, q_len, tokens")]
    shown = table(README, "b, h, q_len, tokens")
    assert len(shown) >= 3
    assert [row for row in shown if row not in measured] == []


def ranges(text: str) -> dict[tuple[str, str], tuple[float, float]]:
    """ "1.08x to 1.75x faster than FlashMLA" → ("faster", "FlashMLA"): (1.08, 1.75)."""
    pattern = r"([\d.]+)x to ([\d.]+)x (faster|slower) than ([A-Z][\w-]*\w)"
    found = re.findall(pattern, " ".join(text.split()))
    return {(way, peer): (float(low), float(high)) for low, high, way, peer in found}


def speeds(heading: str, column: str) -> list[str]:
    """The cells of a column of a table of `measured.md`."""
    ((header, rows),) = (each for each in tables(section(heading)) if column in each[0])
    return [row[header.index(column)] for row in rows]


def spread(heading: str, column: str) -> tuple[float, float]:
    """The least and the largest speed in a column."""
    found = [first_number(cell) for cell in speeds(heading, column)]
    return min(found), max(found)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/flash_mla.md"])
def test_a_page_gives_the_range_of_every_speed(page):
    expected = {
        ("faster", "FlashMLA"): spread("H200: decode", "against FlashMLA"),
        ("faster", "FlashAttention-3"): spread("H200: decode", "against FA3"),
    }
    said = ranges((ROOT / page).read_text(encoding="utf-8"))
    assert ("faster", "FlashMLA") in said
    assert {key: said[key] for key in said if key in expected} == {
        key: expected[key] for key in said if key in expected
    }


@pytest.mark.parametrize("page", ["README.md", "docs/flash_mla.md"])
def test_a_page_gives_the_range_of_sparse_decode(page):
    assert not any("slower" in cell for cell in speeds("H200: sparse decode", "against FlashMLA"))
    low, high = spread("H200: sparse decode", "against FlashMLA")
    said = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert re.search(rf"sparse decode over FP8 rows (is )?{low:.2f}x to {high:.2f}x", said)
