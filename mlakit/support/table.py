"""Which backend carries out an op on every kind of device, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table

from mlakit import dispatch
from mlakit.formats import FORMATS
from mlakit.geometry import MLAGeometry
from mlakit.specs import Problem
from mlakit.workloads.stage import DTYPES

ARCHITECTURES = {
    80: "A100",
    86: "RTX 30, A40",
    89: "L40S, RTX 40",
    90: "H100, H200",
    100: "B200",
    120: "RTX 50",
}
MODEL = MLAGeometry.preset("deepseek-v3")
CACHED_OPS = ("norm_rope_quant_append", "mla_decode", "sparse_mla", "indexer_logits")


@dataclass(frozen=True)
class Verdict:
    """What the backends of an op say to one problem."""

    op: str
    problem: Problem
    objections: dict[str, str | None]  # by backend; None: takes it

    @property
    def chosen(self) -> str | None:
        """The backend that `auto` picks."""
        takers = [backend for backend, reason in self.objections.items() if reason is None]
        return takers[0] if takers else None

    def as_json(self) -> dict[str, object]:
        return {
            "op": self.op,
            "problem": str(self.problem),
            "chosen": self.chosen,
            "objections": self.objections,
        }


def problem_of(
    op: str,
    arch: int | None,
    *,
    dtype: str = "bf16",
    format: str = "bf16",
    heads: int = 128,
    page_size: int = 64,
    mask: str = "causal",
) -> Problem:
    """A problem of `op` at the widths of DeepSeek-V3; `arch` None is the CPU."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be of {', '.join(DTYPES)}, got {dtype!r}")
    if format not in FORMATS:
        raise ValueError(f"format must be of {', '.join(FORMATS)}, got {format!r}")
    device = {"device": "cpu"} if arch is None else {"device": "cuda", "arch": arch}
    if op in CACHED_OPS:
        facts: dict[str, object] = {"format": format, "page_size": page_size, "row": MODEL.row}
    elif op == "mla_prefill":
        widths = (MODEL.qk_nope_head_dim, MODEL.qk_rope_head_dim, MODEL.v_head_dim)
        facts = {"head_widths": widths}
    else:
        facts = {}
    named = {"dtype": str(DTYPES[dtype]), "heads": heads, "mask": mask}  # as a call names them
    return Problem(**device, **named, **facts)  # type: ignore[arg-type]


def verdict(op: str, problem: Problem) -> Verdict:
    return Verdict(op, problem, dispatch.explain(op, problem))


def verdicts() -> list[list[Verdict]]:
    """For every op: on the CPU, then on every architecture."""
    return [
        [verdict(op, problem_of(op, arch)) for arch in (None, *ARCHITECTURES)]
        for op in dispatch.OPS
    ]


def support_table(rows: list[list[Verdict]]) -> Table:
    cards = "; ".join(f"sm_{arch} {names}" for arch, names in ARCHITECTURES.items())
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0), caption=cards, caption_justify="left")
    for heading in ("op", "cpu", *(f"sm_{arch}" for arch in ARCHITECTURES)):
        shown.add_column(heading, no_wrap=True)
    for row in rows:
        shown.add_row(row[0].op, *(each.chosen or "—" for each in row))
    return shown


def markdown(rows: list[list[Verdict]]) -> str:
    """The table as the README has it."""
    headings = ["op", "cpu", *(f"sm_{arch} ({names})" for arch, names in ARCHITECTURES.items())]
    lines = [headings, ["---"] * len(headings)]
    lines += [[f"`{row[0].op}`", *(each.chosen or "—" for each in row)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def explanation(each: Verdict) -> Table:
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("backend", no_wrap=True)
    shown.add_column(f"{each.op} on {each.problem}")
    for backend, reason in each.objections.items():
        says = reason or (
            "[green]yes, and auto picks it[/green]" if backend == each.chosen else "yes"
        )
        shown.add_row(backend, says)
    return shown
