"""Reports as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from mlakit.tools.bench.charts import charts
from mlakit.tools.bench.compare import HEADINGS, Change, Comparison
from mlakit.tools.bench.report import MLAKIT, WALL, Report, Row
from mlakit.tools.bench.tables import (
    PERCENTILES,
    SPEEDUP,
    digits,
    left_out_lines,
    percent,
    target_text,
    times_of,
)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; color: #222;
  padding: 0 1rem; background: #fff }
h1, h2, h3 { line-height: 1.2 }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 }
th, td { padding: 2px 10px; text-align: right; white-space: nowrap }
th { border-bottom: 2px solid #444 }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left }
tr.first td { border-top: 1px solid #ddd }
tr.mlakit td { font-weight: 600 }
td.good { color: #1a7f37 }
td.bad { color: #b42318 }
pre { background: #f4f4f4; padding: .6rem 1rem; overflow-x: auto }
figure { margin: 1rem 0; overflow-x: auto }
"""


def page(reports: Sequence[Report], comparison: Comparison | None = None) -> str:
    """All reports of a run, and the comparison with another run if there is one."""
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
        WALL: "Wall-clock time of a call on the CPU.",
        "cold": "GPU time of one call with a cold L2.",
        "b2b": "GPU time of a call among back-to-back calls.",
        "graph": "GPU time of one CUDA graph replay of the call, with a cold L2.",
        "host": "Host time of an asynchronous call.",
    }
    return (
        f"{methods.get(mode, mode)} Implementations run interleaved in one process; "
        f"{PERCENTILES}. {SPEEDUP.capitalize()}."
    )


def _rows(report: Report) -> str:
    in_ms = report.mode == WALL
    unit, divisor = ("ms", 1e3) if in_ms else ("us", 1.0)
    rate, rate_divisor = ("GFLOP/s", 1.0) if in_ms else ("TFLOP/s", 1e3)
    heads = ("workload", "implementation", unit, "p20 – p80", rate, "GB/s", "% roofline", "rounds")
    lines = []
    previous = ""
    for row in report.rows:
        cells = [
            "" if row.workload == previous else row.workload,
            row.implementation,
            digits(row.us.p50 / divisor),
            f"{digits(row.us.p20 / divisor)} – {digits(row.us.p80 / divisor)}",
            digits(row.gflops / rate_divisor),
            digits(row.gbytes_per_s),
            percent(row.roofline),
            str(row.rounds),
            *_speedup_cells(row),
        ]
        kinds = (
            "first" if row.workload != previous else "",
            "mlakit" if row.implementation == MLAKIT else "",
        )
        lines.append(_line(cells, " ".join(filter(None, kinds)), _colour(row.met)))
        previous = row.workload
    return _table((*heads, "speedup", "p20 – p80", "target"), lines)


def _speedup_cells(row: Row) -> tuple[str, str, str]:
    if row.speedup is None:
        return "", "", ""
    span = f"{times_of(row.speedup.p20)} – {times_of(row.speedup.p80)}"
    return times_of(row.speedup.p50), span, target_text(row)


def _colour(is_good: bool | None) -> str:
    return "" if is_good is None else "good" if is_good else "bad"


def _comparison(comparison: Comparison) -> str:
    lines = [
        _line([*each.figures, each.text], "first", _change_colour(each))
        for each in comparison.changes
    ]
    summary = f"<p>{escape(comparison.summary)}</p>"
    return f"<h2>What changed</h2>\n{summary}\n{_table(HEADINGS, lines)}"


def _change_colour(change: Change) -> str:
    return _colour(change.is_better if change.has_moved else None)


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


def _line(cells: Sequence[str], kind: str, colour: str) -> str:
    """A row of a table; `colour` is the CSS class of its last cell."""
    *others, last = (escape(cell) for cell in cells)
    marked = f' class="{colour}"' if colour else ""
    row = f' class="{kind}"' if kind else ""
    return (
        f"<tr{row}>"
        + "".join(f"<td>{cell}</td>" for cell in others)
        + f"<td{marked}>{last}</td></tr>\n"
    )
