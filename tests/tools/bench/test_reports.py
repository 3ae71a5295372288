"""Reports: their schema, targets, comparison, heat maps and charts; no suite is run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mlakit.tools.bench import charts, heatmap, suite
from mlakit.tools.bench.ceilings import Ceilings
from mlakit.tools.bench.compare import compare
from mlakit.tools.bench.report import LeftOut, Memory, MemoryUse, Report, Row
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload
from mlakit.tools.bench.tables import left_out_lines, target_text
from tests.tools.bench.fakes import CEILINGS, around, report, row


def test_a_report_survives_json():
    stored = report(
        row("a", "mlakit", 10.0, roofline=0.5),
        row("a", "fa3", 20.0, speedup=around(2.0), min_speedup=1.1, met=True),
    )
    assert Report.from_json(json.loads(json.dumps(stored.as_json()))) == stored
    use = MemoryUse(weights=3, cache=2, step=1)
    with_memory = replace(stored, memory=(Memory("a", "mlakit", use),))
    assert Report.from_json(json.loads(json.dumps(with_memory.as_json()))) == with_memory


@pytest.mark.parametrize(
    ("flops", "num_bytes", "products", "traffic", "us"),
    [
        (7 * 10**8, 0, "bf16", "read", 1.0),
        (12 * 10**8, 0, "fp8", "read", 1.0),
        (7 * 10**8, 8 * 10**6, "bf16", "read", 2.0),
        (0, 7 * 10**6, "bf16", "copy", 2.0),
    ],
)
def test_the_least_time_is_the_longer_of_two(flops, num_bytes, products, traffic, us):
    least = CEILINGS.roofline_us(flops, num_bytes, products=products, traffic=traffic)
    assert least == pytest.approx(us)


def test_without_fp8_products_bf16_is_the_ceiling():
    old = replace(CEILINGS, fp8_tflops=None)
    assert old.roofline_us(7 * 10**8, 0, products="fp8", traffic="read") == pytest.approx(1.0)
    assert "fp8 none" in str(old)


class Reader(Workload):
    """1 MB with a target of 1.1x of a peer, or 98 % of the read bandwidth."""

    op = "stub"
    name = "reader"
    flops = 0
    bytes = 1_000_000
    min_speedup = 1.1
    target_baseline = "peer"
    min_read_share = 0.98
    small = None

    def build_case(self) -> BenchmarkCase:
        others = [Baseline("peer", str), Baseline("faster", str)]
        return BenchmarkCase(str, others, check=lambda: None)


@pytest.mark.parametrize(
    ("own_s", "met", "said"),
    [
        (0.89e-3, True, "≥ 1.10x"),
        (0.95e-3, False, "below 1.10x"),
    ],
)
def test_the_target_refers_to_its_baseline(own_s, met, said, monkeypatch):
    times = {"mlakit": [own_s] * 3, "peer": [1e-3] * 3, "faster": [1e-4] * 3}
    monkeypatch.setattr(suite, "time_interleaved", lambda calls, **_: {n: times[n] for n in calls})
    monkeypatch.setattr(suite, "_too_slow", lambda small: {})
    rows = suite.run("stub", [Reader()], command="").rows
    by_name = {each.implementation: each for each in rows}
    assert (by_name["peer"].min_speedup, by_name["peer"].met) == (1.1, met)
    assert target_text(by_name["peer"]) == said
    assert (by_name["faster"].min_speedup, by_name["faster"].met) == (None, None)


@pytest.mark.parametrize(("read_gb_s", "met"), [(1.0, True), (1.1, False)])
def test_enough_bandwidth_meets_the_target(read_gb_s, met, monkeypatch):
    times = {"mlakit": [1e-3] * 3, "peer": [1e-3] * 3, "faster": [1e-4] * 3}
    monkeypatch.setattr(suite, "time_interleaved", lambda calls, **_: {n: times[n] for n in calls})
    monkeypatch.setattr(suite, "_too_slow", lambda small: {})
    found = Ceilings(read_gb_s, 1.0, 1.0, None)
    rows = suite.run("stub", [Reader()], command="", ceilings=found).rows
    (peer,) = (each for each in rows if each.implementation == "peer")
    assert peer.met is met
    assert target_text(peer) == ("below 1.10x, bandwidth reached" if met else "below 1.10x")
    assert rows[0].roofline == pytest.approx(1 / read_gb_s)


def test_a_reason_that_many_share_is_said_once():
    lines = left_out_lines(
        [LeftOut("a", "fa3", "absent"), LeftOut("b", "fa3", "absent"), LeftOut("b", "x", "slow")]
    )
    assert lines == ["2 workloads: fa3 not timed, absent", "b: x not timed, slow"]


@pytest.mark.parametrize(
    ("before", "now", "share", "moved"),
    [
        (100.0, 101.9, 0.01, False),
        (100.0, 103.0, 0.01, True),
        (100.0, 97.0, 0.01, True),
        (100.0, 103.0, 0.02, False),
    ],
)
def test_a_figure_has_moved_by_more_than_its_spread(before, now, share, moved):
    old = report(row("a", "mlakit", before, share))
    new = report(row("a", "mlakit", now, 0.001))
    (change,) = compare([old], [new]).changes
    assert change.has_moved is moved
    (back,) = compare([new], [old]).changes
    assert back.has_moved is moved


def test_rows_of_another_mode_are_not_compared():
    old, new = report(row("a", "mlakit", 1.0)), report(row("a", "mlakit", 2.0), mode="graph")
    comparison = compare([old], [new])
    assert comparison.changes == []
    assert (comparison.only_before, comparison.only_now) == (["a"], ["a"])


GRID = [
    row("grid-bf16-b1-h8-1024", "mlakit", 10.0, roofline=0.5),
    row("grid-bf16-b1-h8-1024", "flash_mla", 20.0, speedup=around(2.0)),
    row("grid-bf16-b1-h8-1024", "fa3", 12.5, speedup=around(1.25)),
    row("grid-bf16-b4-h8-65536", "mlakit", 10.0, roofline=0.9),
    row("grid-bf16-b4-h8-65536", "fa3", 8.0, speedup=around(0.8)),
    row("grid-bf16-b4-h16-1024", "mlakit", 10.0, roofline=0.7),
    row("grid-bf16-b4-h16-1024", "fa3", 10.0, speedup=around(1.0)),
]


def test_a_map_holds_the_speedup_over_the_fastest_peer():
    eight, sixteen = heatmap.heat_maps(GRID)
    assert eight.cells == {(1024, 1): 1.25, (65536, 4): 0.8}
    assert sixteen.cells == {(1024, 4): 1.0}
    assert (eight.lengths, eight.columns) == ([1024, 65536], [1, 4])
    assert eight.goodness(1024, 1) == pytest.approx(0.5)
    assert eight.goodness(65536, 4) == pytest.approx(-0.625)
    assert sixteen.goodness(1024, 4) == 0


def test_a_map_without_peers_holds_shares_of_the_roofline():
    alone = [each for each in GRID if each.implementation == "mlakit"]
    eight, _ = heatmap.heat_maps(alone)
    assert eight.cells == {(1024, 1): 0.5, (65536, 4): 0.9}
    assert eight.text(65536, 4) == "90 %"
    assert "share of the roofline" in eight.title


def test_a_report_without_ceilings_has_no_roofline():
    def kinds(*rows: Row, **others: object) -> list[str]:
        return [kind for kind, _ in charts.charts(report(*rows, **others))]

    assert kinds(row("a", "mlakit", 1.0), ceilings=None) == ["bars"]
    assert kinds(row("a", "mlakit", 1.0, flops=0)) == ["bars"]
    assert kinds(row("a", "read same bytes", 1.0)) == ["bars"]
    assert kinds() == []
