"""Reads reports of older schemas: `mlakit bench --compare` and `--from` take them.

1  rows without `met` and `roofline`, reports without `mode` and `ceilings`
2  `contender` instead of `implementation`; `ratio`, mlakit's time / the other's, instead of
   `speedup`; `limit` on that ratio instead of `min_speedup`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OLD_SCHEMAS = (1, 2)
RENAMED = {"reading its bytes": "read same bytes", "copying its bytes": "copy same bytes"}
# the quantiles swap ends: the smallest ratio is the largest speedup
SPEEDUPS = {"p20": "p80", "p50": "p50", "p80": "p20"}
REPLACED = ("contender", "limit", *(f"ratio_{p}" for p in SPEEDUPS))


def upgraded(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The report with the keys of the current schema."""
    return {
        "mode": "wall" if stored["suite"] == "cpu" else "cold",
        "ceilings": None,
        **stored,
        "rows": [_row(each) for each in stored["rows"]],
        "left_out": [_named(each, "contender") for each in stored["left_out"]],
    }


def _row(stored: Mapping[str, Any]) -> dict[str, Any]:
    limit, ratio, met = stored["limit"], stored["ratio_p50"], stored.get("met")
    if met is None and limit is not None and ratio is not None:
        met = ratio <= limit  # schema 1 left the comparison to the reader
    return {
        **_named(stored, *REPLACED),
        **{f"speedup_{new}": _inverse(stored[f"ratio_{old}"]) for new, old in SPEEDUPS.items()},
        "min_speedup": _inverse(limit),
        "met": met,
        "roofline": stored.get("roofline"),
    }


def _named(stored: Mapping[str, Any], *replaced: str) -> dict[str, Any]:
    """The entry with `implementation`, and without the keys in `replaced`."""
    name = stored["contender"]
    kept = {key: value for key, value in stored.items() if key not in replaced}
    return {**kept, "implementation": RENAMED.get(name, name)}


def _inverse(value: float | None) -> float | None:
    return None if value is None else 1 / value
