"""Writes the tables of figures into the pages, from the reports in docs/data: `make figures`.

A page has a table between `<!-- figure: NAME -->` and `<!-- end -->`, where NAME is one of FIGURES.
A table has a line for each workload, by the name that `mlakit bench --only` takes, and ends with
its date, versions and command. `--check` names the pages that are not as their data has them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "data"
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("measured", "vllm", "flashinfer", "notes/races")),
)
MARKER = re.compile(r"(<!-- figure: ([a-z0-9_-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
OURS = "mlakit"
EMULATOR = "emulator"
LEVEL = 0.005  # speeds that differ by less are the same
NAMES = {
    "flash_mla": "FlashMLA", "fa3": "FlashAttention-3", "sdpa": "SDPA", "deep_gemm": "DeepGEMM",
    "eager": "eager torch", "bf16 rows": "its own bf16 rows", "bf16 matmul": "bf16 by cuBLAS",
    "FLASHMLA": "FLASHMLA", "FLASH_ATTN_MLA": "FLASH_ATTN_MLA",
    "mlakit bf16": "its own bf16 prefill", "torch.topk": "`torch.topk`",
    "GEMMs + attention": "its products and attention alone", "mlakit, graph replay": "graph replay",
}  # fmt: skip

# of reports that do not say so themselves
TAKEN = {
    "h200-branch.json": ("2026-11-17", "3143066"),
    "h200-decode.json": ("2026-11-18", "420ec1f"),
    "h200-decode-host.json": ("2026-11-16", "6fbe756"),
    "h200-engine-speed.json": ("2026-11-19", "efe7c76"),
    "h200-fp8.json": ("2026-11-18", "a5f8a03"),
    "h200-grid.json": ("2026-11-16", "6fbe756"),
    "h200-indexer.json": ("2026-11-17", "a23016b"),
    "h200-layer.json": ("2026-11-17", ""),
    "h200-long-context.json": ("2026-11-17", ""),
    "h200-prefill.json": ("2026-11-18", "9d16ed6"),
    "h200-prefill-fp8.json": ("2026-11-18", "1bb31e9"),
    "h200-prefill-grid.json": ("2026-11-18", "f10a798"),
    "h200-sparse-decode.json": ("2026-11-18", "e574e43"),
    "h200-sparse-prefill.json": ("2026-11-18", "9d16ed6"),
    "h200-sparse-step.json": ("2026-11-17", "9285619"),
    "h200-transformers.json": ("2026-11-17", "e1a8f91"),
    "h200-vllm.json": ("2026-11-18", "9d16ed6"),
}
Times = Mapping[str, float]  # microseconds by implementation


@dataclass(frozen=True)
class Figure:
    """A table of one report.

    shown    implementations beside mlakit, in order
    against  those of `shown` whose speed is given
    only     workloads whose names match
    part     shows what share of each time the workloads of this name take: `attention` of a step
    """

    file: str
    shown: tuple[str, ...]
    against: tuple[str, ...] = ()
    only: str = ""
    part: str = ""

    def workloads(self, only: str | None = None) -> dict[str, Times]:
        found: dict[str, dict[str, float]] = {}
        for row in self.report()["rows"]:
            if re.search(self.only if only is None else only, row["workload"]):
                found.setdefault(row["workload"], {})[row["implementation"]] = row["p50_us"]
        return found

    def report(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((DATA / self.file).read_text(encoding="utf-8"))
        return content

    def speeds(self, peers: tuple[str, ...]) -> list[float]:
        """Return how much faster mlakit is than the fastest of the peers, for each workload."""
        measured = self.workloads().values()
        return [
            min(times[peer] for peer in peers if peer in times) / times[OURS]
            for times in measured
            if OURS in times and any(peer in times for peer in peers)
        ]

    def table(self) -> str:
        names = [NAMES.get(each, each) for each in self.shown]
        header = ["workload", "mlakit, us", *(f"{name}, us" for name in names)]
        header += [f"against {NAMES.get(each, each)}" for each in self.against]
        parts = self.workloads(rf"^{self.part}-") if self.part else {}
        header += [f"{self.part}'s share"] if self.part else []
        lines = [header, ["---"] * len(header)]
        for workload, times in self.workloads().items():
            cells = [us(times.get(each)) for each in (OURS, *self.shown)]
            cells += [
                speed(times[each] / times[OURS]) if each in times else "" for each in self.against
            ]
            if self.part:
                own = parts[f"{self.part}-{workload.partition('-')[2]}"]
                shares = (own[each] / times[each] for each in (OURS, *self.shown) if each in own)
                cells.append(", ".join(f"{100 * share:.0f} %" for share in shares))
            lines.append([f"`{workload}`", *cells])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n" + self.footer()

    def footer(self) -> str:
        report = self.report()
        made = report["environment"]
        versions = f"torch {made['torch'].partition('+')[0]}, Triton {made['triton']}"
        if "vllm" in made:
            versions += f", vLLM {made['vllm']}"
        date, commit = TAKEN.get(self.file, (made.get("date", ""), made.get("commit") or ""))
        command = report["command"].replace("h200.json", "FILE").replace(self.file, "FILE")
        where = f"[{self.file}](data/{self.file})"
        facts = ", ".join(
            filter(None, (date, made["gpu"], versions, commit and f"commit {commit}"))
        )
        return f"<sub>{facts}. `{command}`: {where}</sub>"


def us(time: float | None) -> str:
    if time is None:
        return ""
    return f"{time:.0f}" if time >= 100 else f"{time:.1f}"


def speed(ratio: float) -> str:
    if abs(ratio - 1) < LEVEL:
        return "level"
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"**{1 / ratio:.2f}x slower**"


def span(ratios: list[float]) -> str:
    """Return the span of speeds, the best first: 1.52x faster to 1.25x slower."""
    best, worst = speed(max(ratios)).strip("*"), speed(min(ratios)).strip("*")
    if best == worst:
        return best
    if "faster" in best and "faster" in worst:
        return f"{worst.removesuffix(' faster')} to {best}"
    return f"{best} to {worst}"


ENGINE = ("FLASHMLA", "FLASH_ATTN_MLA")  # backends of vLLM
FLASH_MLA, FA3, SDPA, DEEP_GEMM, EAGER = "flash_mla", "fa3", "sdpa", "deep_gemm", "eager"
FIGURES = {
    "decode": Figure("h200-decode.json", (FLASH_MLA, FA3), (FLASH_MLA, FA3), r"^decode-bf16"),
    "decode-fp8": Figure("h200-decode.json", ("bf16 rows",), ("bf16 rows",), r"^decode-fp8"),
    "decode-host": Figure(
        "h200-decode-host.json",
        ("mlakit, graph replay", FLASH_MLA, FA3, "empty kernel"),
        (FLASH_MLA,),
    ),
    "grid": Figure("h200-grid.json", (FLASH_MLA, FA3), (FLASH_MLA, FA3)),
    "prefill": Figure("h200-prefill.json", (FA3, SDPA), (FA3, SDPA)),
    "prefill-fp8": Figure("h200-prefill-fp8.json", ("mlakit bf16",), ("mlakit bf16",)),
    "prefill-grid": Figure("h200-prefill-grid.json", (FA3, SDPA), (FA3, SDPA)),
    "sparse-decode": Figure("h200-sparse-decode.json", (FLASH_MLA, EAGER), (FLASH_MLA,)),
    "sparse-prefill": Figure("h200-sparse-prefill.json", (FLASH_MLA, FA3), (FLASH_MLA, FA3)),
    "indexer": Figure("h200-indexer.json", (DEEP_GEMM,), (DEEP_GEMM,), r"^indexer-logits"),
    "topk": Figure(
        "h200-indexer.json", ("torch.topk", "read same bytes"), ("torch.topk",), r"top-?k"
    ),
    "branch": Figure("h200-branch.json", ("GEMMs + attention",), ("GEMMs + attention",)),
    "fp8": Figure("h200-fp8.json", (DEEP_GEMM, "bf16 matmul"), (DEEP_GEMM, "bf16 matmul")),
    "layer": Figure(
        "h200-layer.json", ("GEMMs in a row", "read same bytes"), (), r"-b(1|128)-h128-4096$"
    ),
    "long-context": Figure(
        "h200-long-context.json", ("GEMMs + attention",), ("GEMMs + attention",)
    ),
    "vllm": Figure("h200-vllm.json", (FLASH_MLA, FA3), (FLASH_MLA, FA3)),
    **{
        f"engine-{op}": Figure("h200-engine-speed.json", ENGINE, ENGINE, rf"^{op}", part)
        for op, part in (("attention", ""), ("step", "attention"), ("first_token", ""))
    },
    "transformers": Figure("h200-transformers.json", ("mlakit, CUDA graph", EAGER, SDPA), (EAGER,)),
}
# a line each: the workload, the figure, and the peers of which the fastest counts
SUMMARY = (
    ("decode, bf16", "decode", (FLASH_MLA,)),
    ("decode, bf16", "decode", (FA3,)),
    ("decode, 120 shapes", "grid", (FLASH_MLA, FA3)),
    ("sparse decode, FP8 rows", "sparse-decode", (FLASH_MLA,)),
    ("sparse prefill", "sparse-prefill", (FLASH_MLA,)),
    ("sparse prefill", "sparse-prefill", (FA3,)),
    ("dense prefill", "prefill", (FA3,)),
    ("dense prefill, 40 shapes", "prefill-grid", (FA3, SDPA)),
    ("indexer scores", "indexer", (DEEP_GEMM,)),
    ("top-k of 2048", "topk", ("torch.topk",)),
    ("host time of a decode call", "decode-host", (FLASH_MLA,)),
    ("attention in a step of vLLM", "engine-attention", ENGINE),
    ("calls of the vLLM plugin", "vllm", (FLASH_MLA, FA3)),
    ("whole steps", "branch", ("GEMMs + attention",)),
    ("prefill over a long context", "long-context", ("GEMMs + attention",)),
    ("block-scaled FP8 products", "fp8", (DEEP_GEMM,)),
    ("decode over an FP8 cache", "decode-fp8", ("bf16 rows",)),
    ("e4m3 prefill", "prefill-fp8", ("mlakit bf16",)),
    ("a patched model of transformers", "transformers", (EAGER,)),
)


def summary() -> str:
    lines = ["| workload | against | speed | median |", "| --- | --- | --- | --- |"]
    for workload, name, peers in SUMMARY:
        ratios = FIGURES[name].speeds(peers)
        against = " or ".join(NAMES[peer] for peer in peers)
        if len(peers) > 1:
            against = f"the faster of {against.replace(' or ', ' and ')}"
        lines.append(f"| {workload} | {against} | {span(ratios)} | {speed(median(ratios))} |")
    return "\n".join(lines)


def launches() -> str:
    """Random launches of each kernel on GPUs; a line without a kernel is of all of a backend."""
    counts: dict[tuple[str, str], dict[str, int]] = {}
    versions: set[str] = set()
    for each in json.loads((DATA / "random-launches.json").read_text(encoding="utf-8")):
        name = f"{each['backend']}:{each['kernel']}" if each["kernel"] else each["backend"]
        count = counts.setdefault((each["op"], name), {"wrong": 0, EMULATOR: 0})
        if each["device"] == EMULATOR:
            count[EMULATOR] += each["launches"]
            continue
        versions.add(each["triton"])
        count[each["triton"]] = count.get(each["triton"], 0) + each["launches"]
        count["wrong"] += each["wrong"]
    tritons = sorted(versions)
    shown = [*tritons, "wrong", EMULATOR]
    headings = [*(f"with Triton {each}" for each in tritons), "wrong", "in the emulator"]
    lines = [f"| op | kernel | {' | '.join(headings)} |", "| --- " * (2 + len(shown)) + "|"]
    for (op, name), count in sorted(counts.items()):
        cells = " | ".join(str(count.get(column, 0)) for column in shown)
        lines.append(f"| `{op}` | `{name}` | {cells} |")
    return "\n".join(lines)


def solutions() -> str:
    """Return the solutions of FlashInfer-Bench's definitions, and how they compare on a CPU."""
    record = json.loads((DATA / "flashinfer-bench.json").read_text(encoding="utf-8"))
    lines = [
        "| definition | function | largest error / allowed | time |",
        "| --- | --- | --- | --- |",
    ]
    for each in record["solutions"]:
        share = 100 * each["share_of_rule"]
        error = "equal entries" if "topk_indexer" in each["definition"] else f"{share:.1f} %"
        lines.append(f"| `{each['definition']}` | `{each['function']}` | {error} | not timed |")
    torch = record["torch"].partition("+")[0]
    facts = f"{record['date']}, a CPU, torch {torch}, definitions of {record['definitions']}"
    return "\n".join(lines) + f"\n\n<sub>{facts}: [data](data/flashinfer-bench.json)</sub>"


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "launches": launches,
    "flashinfer-bench": solutions,
} | {name: figure.table for name, figure in FIGURES.items()}


def filled(page: str) -> str:
    """Return the page with its tables made anew. Raises KeyError for an unknown name."""
    return MARKER.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", page)


def stale() -> Iterator[Path]:
    """Yield the pages whose tables are not those of the data."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if filled(text) != text:
            yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing, fail if a page is stale"
    )
    if parser.parse_args().check:
        pages = [str(path.relative_to(ROOT)) for path in stale()]
        sys.exit(f"make figures writes these pages anew: {', '.join(pages)}" if pages else 0)
    for path in stale():
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
