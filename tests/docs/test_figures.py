"""The tables of figures are made from the reports: no page has another one."""

from __future__ import annotations

import json

import figures
import landing_chart
import pytest

REPORT = {
    "command": "mlakit bench decode --json h200.json",
    "environment": {
        "gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "triton": "3.6.0",
        "date": "2026-11-18", "commit": "abc1234",
    },
    "rows": [
        {"workload": name, "implementation": implementation, "p50_us": time}
        for name, times in {"a": (10.0, 12.0, 10.04), "b": (200.0, 150.0, None)}.items()
        for implementation, time in zip(("mlakit", "flash_mla", "fa3"), times, strict=True)
        if time is not None
    ],
}  # fmt: skip


@pytest.fixture
def figure(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "DATA", tmp_path)
    (tmp_path / "new.json").write_text(json.dumps(REPORT))
    return figures.Figure("new.json", ("flash_mla", "fa3"), ("flash_mla", "fa3"))


def test_pages_have_the_figures_of_their_data():
    assert list(figures.stale()) == []


def test_the_chart_of_the_first_pages_has_the_times_of_its_data():
    assert landing_chart.facts().encode() in landing_chart.FILE.read_bytes()
    groups = landing_chart.workloads()
    assert len(groups) == 8
    assert all({"mlakit", "flash_mla"} <= set(times) for _, times in groups)
    assert groups[-1].label.splitlines()[2:] == ["2048 of 32k tokens", "sparse, FP8"]
    assert "2 queries each" in groups[1].label
    for fact in ("NVIDIA H200", "2026-11-18", "torch 2.11.0", "Triton 3.6.0"):
        assert fact in landing_chart.where()


@pytest.mark.parametrize("name", figures.TABLES)
def test_every_table_has_lines(name):
    lines = figures.TABLES[name]().splitlines()
    assert sum(line.startswith("| ") for line in lines) > 2
    assert all(line.count("|") == lines[0].count("|") for line in lines if line.startswith("| "))


def test_a_table_has_times_speeds_and_where_they_come_from(figure):
    assert figure.table().splitlines() == [
        "| workload | mlakit, us | FlashMLA, us | FlashAttention-3, us "
        "| against FlashMLA | against FlashAttention-3 |",
        "| --- | --- | --- | --- | --- | --- |",
        "| `a` | 10.0 | 12.0 | 10.0 | 1.20x faster | level |",
        "| `b` | 200 | 150 |  | **1.33x slower** |  |",
        "",
        "<sub>2026-11-18, NVIDIA H200, torch 2.11.0, Triton 3.6.0, commit abc1234. "
        "`mlakit bench decode --json FILE`: [new.json](data/new.json)</sub>",
    ]


def test_the_page_of_vllm_says_in_how_many_pairs_a_step_is_behind():
    step = figures.FIGURES["engine-step"]
    behind = [1 / each for each in step.speeds(figures.ENGINE) if each < 1 / 1.01]
    text = " ".join((figures.ROOT / "docs" / "vllm.md").read_text().split())
    said = f"In {len(behind)} of {len(step.workloads())} pairs of batch and context"
    assert f"{said} the whole step takes more than 1.01 times as long" in text
    assert f"fastest backend: {min(behind):.2f} to {max(behind):.2f} times" in text
    first = figures.FIGURES["engine-first_token"].speeds(figures.ENGINE)
    (late,) = (each for each in first if each < 1)
    assert f"In 1 of {len(first)} it is behind, by {100 * (1 / late - 1):.1f} %" in text
    assert min(figures.FIGURES["engine-attention"].speeds(figures.ENGINE)) > 1


def test_speeds_are_those_against_the_fastest_peer(figure):
    assert figure.speeds(("flash_mla", "fa3")) == pytest.approx([1.004, 0.75])


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ([1.2, 1.5], "1.20x to 1.50x faster"),
        ([0.5, 1.5], "1.50x faster to 2.00x slower"),
        ([1.001, 1.5], "1.50x faster to level"),
        ([1.5], "1.50x faster"),
        ([0.5, 0.8], "1.25x slower to 2.00x slower"),
    ],
)
def test_spans_of_speeds(ratios, text):
    assert figures.span(ratios) == text


def test_a_page_keeps_all_but_its_tables():
    page = "before\n<!-- figure: summary -->\nold\n<!-- end -->\nafter <!-- end -->\n"
    made = figures.filled(page)
    assert made.startswith("before\n<!-- figure: summary -->\n| workload |")
    assert made.endswith("|\n<!-- end -->\nafter <!-- end -->\n")
    with pytest.raises(KeyError):
        figures.filled("<!-- figure: unheard-of -->\n<!-- end -->")
