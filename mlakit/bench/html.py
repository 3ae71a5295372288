"""Reports as one page that needs nothing else: style and pictures are in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from mlakit.bench.charts import charts
from mlakit.bench.compare import Comparison
from mlakit.bench.report import OURS, WALL, Report, Row
from mlakit.bench.tables import digits, left_out_lines, percent, verdict

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; color: #222;
  padding: 0 1rem; background: #fff }
h1, h2, h3 { line-height: 1.2 }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 }
th, td { padding: 2px 10px; text-align: right; white-space: nowrap }
th { border-bottom: 2px solid #444 }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left }
tr.first td { border-top: 1px solid #ddd }
tr.ours td { font-weight: 600 }
td.good { color: #1a7f37 }
td.bad { color: #b42318 }
pre { background: #f4f4f4; padding: .6rem 1rem; overflow-x: auto }
figure { margin: 1rem 0; overflow-x: auto }
"""


def page(reports: Sequence[Report], comparison: Comparison | None = None) -> str:
    """All reports of a run, and what moved since another where that was asked for."""
    parts = [_section(report) for report in reports]
    if comparison is not None:
        parts.insert(0, _comparison(comparison))
    gpus = {str(r.environment.get("gpu") or r.environment.get("cpu")) for r in reports}
    title = f"mlakit bench on {', '.join(sorted(gpus))}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{_commands(reports)}\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _commands(reports: Sequence[Report]) -> str:
    commands = dict.fromkeys(report.command for report in reports)
    return "<pre>" + escape("\n".join(f"$ {command}" for command in commands)) + "</pre>"


def _section(report: Report) -> str:
    ceilings = "" if report.ceilings is None else f"<p>{escape(str(report.ceilings))}</p>"
    pictures = "\n".join(f"<figure>{chart.svg()}</figure>" for chart in charts(report).values())
    left_out = "".join(f"<li>{escape(line)}</li>" for line in left_out_lines(report.left_out))
    return (
        f"<h2>{escape(report.suite)}</h2>\n<p>{escape(_method(report.mode))}</p>\n{ceilings}\n"
        f"{_rows(report)}\n{pictures}\n"
        + (f"<h3>Not timed</h3>\n<ul>{left_out}</ul>\n" if left_out else "")
        + _environment(report.environment)
    )


def _method(mode: str) -> str:
    methods = {
        WALL: "Wall clock of a call on the CPU.",
        "cold": "Time of one call on the GPU after other memory was read: L2 is cold.",
        "b2b": "Time of a call on the GPU among calls back to back.",
        "graph": "Time of one replay of a CUDA graph of the call, L2 cold.",
        "host": "Time the host spends on a call that it does not wait for.",
    }
    return (
        f"{methods.get(mode, mode)} Contenders take turns in random order in one process; median, "
        f"and the range of the middle three fifths of the rounds. Ratio: {OURS}'s time over the "
        "contender's in the same round."
    )


def _rows(report: Report) -> str:
    in_ms = report.mode == WALL
    unit, divisor = ("ms", 1e3) if in_ms else ("us", 1.0)
    rate, rate_divisor = ("GFLOP/s", 1.0) if in_ms else ("TFLOP/s", 1e3)
    heads = ("workload", "contender", unit, "range", rate, "GB/s", "% roofline", "rounds")
    lines = []
    previous = ""
    for row in report.rows:
        cells = [
            "" if row.workload == previous else row.workload,
            row.contender,
            digits(row.us.p50 / divisor),
            f"{digits(row.us.p20 / divisor)} – {digits(row.us.p80 / divisor)}",
            digits(row.gflops / rate_divisor),
            digits(row.gbytes_per_s),
            percent(row.roofline),
            str(row.rounds),
            *_ratio_cells(row),
        ]
        kinds = (
            "first" if row.workload != previous else "",
            "ours" if row.contender == OURS else "",
        )
        lines.append(_line(cells, " ".join(filter(None, kinds)), _judgement(row.met)))
        previous = row.workload
    return _table((*heads, "ratio", "range", "limit"), lines)


def _ratio_cells(row: Row) -> tuple[str, str, str]:
    if row.ratio is None:
        return "", "", ""
    span = f"{digits(row.ratio.p20)} – {digits(row.ratio.p80)}"
    return digits(row.ratio.p50), span, verdict(row)


def _judgement(met: bool | None) -> str:
    return "" if met is None else "good" if met else "bad"


def _comparison(comparison: Comparison) -> str:
    lines = [
        _line(
            (
                each.workload,
                each.figure,
                digits(each.before.p50),
                digits(each.now.p50),
                f"{each.factor:.3f}",
                each.verdict,
            ),
            "first",
            _judgement(each.factor < 1 if each.has_moved else None),
        )
        for each in comparison.changes
    ]
    heads = ("workload", "figure", "before", "now", "factor", "verdict")
    return f"<h2>What moved</h2>\n<p>{escape(comparison.summary)}</p>\n{_table(heads, lines)}"


def _environment(facts: dict[str, object]) -> str:
    lines = [
        _line((name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)), "", "")
        for name, value in facts.items()
        if value not in (None, [])
    ]
    return f"<details><summary>Environment</summary>{_table(('fact', 'value'), lines)}</details>"


def _table(heads: Iterable[str], lines: Iterable[str]) -> str:
    titles = "".join(f"<th>{escape(head)}</th>" for head in heads)
    return f"<table>\n<thead><tr>{titles}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody>\n</table>"


def _line(cells: Sequence[str], kind: str, judgement: str) -> str:
    """A row of a table; `judgement` colours its last cell."""
    *others, last = (escape(cell) for cell in cells)
    marked = f' class="{judgement}"' if judgement else ""
    row = f' class="{kind}"' if kind else ""
    return (
        f"<tr{row}>"
        + "".join(f"<td>{cell}</td>" for cell in others)
        + f"<td{marked}>{last}</td></tr>\n"
    )
