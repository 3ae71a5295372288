"""Which backend runs an op on every kind of device, and why the others do not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table

from mlakit.dispatch.architectures import AMD, CARDS, amd_arch, arch_name, card_arch
from mlakit.dispatch.selection import OPS, explain, explain_kernels, specs
from mlakit.dispatch.specs import Problem, ProductShape
from mlakit.formats import ENGINE_NAMES, FORMATS
from mlakit.model.config import config_fields, index_pool
from mlakit.model.geometry import MLAGeometry, RowShape
from mlakit.model.v4 import is_v4
from mlakit.tools.columns import Column, fitting_table
from mlakit.tools.workloads.inputs import DTYPES

NVIDIA = tuple(arch for arch in CARDS if arch not in AMD)
NOT_RUN = f"{', '.join(map(arch_name, AMD))}: compiled, not run"
MODEL = MLAGeometry.preset("deepseek-v3")
V4_FORMATS, V4_ROW = ("fp8_block64",), RowShape(448, 64, v_width=512)  # of DeepSeek-V4 alone
INDEX_KEYS = RowShape(128, 0)  # of DeepSeek-V3.2: the rows of the indexer's own cache
# the output projection of DeepSeek-V3 over a prompt
PRODUCT = ProductShape(1, 4096, 7168, 16384, n_group=128, k_group=128)
INDEX_OPS = ("indexer_logits", "indexer_select")
# of a problem unless it is said: bf16 attention, and the indexer as DeepSeek-V3.2 has it
ATTENTION_FACTS = {"dtype": "bf16", "format": "bf16", "heads": 128}
INDEX_FACTS = {"dtype": "e4m3", "format": "fp8_token", "heads": 64}
CACHED_OPS = (
    "norm_rope_quant_append",
    "append_rows",
    "mla_decode",
    "sparse_mla",
    *INDEX_OPS,
)
HEADED_OPS = (*(op for op in CACHED_OPS if op != "append_rows"), "mla_prefill", "merge_states")
OPS_OF_MODELS = (*HEADED_OPS, "append_rows")  # whose problem depends on the model
MASKED_OPS = ("mla_prefill", "mla_decode", *INDEX_OPS)
# every compute capability of CUDA 12 and 13; from 90 on there is arch-specific code (90a), from 100
# on family-specific code (100f)
CAPABILITIES = (
    *(50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89),
    *(90, 100, 101, 103, 110, 120, 121),
)
ARCH = re.compile(r"(?:sm_?)?(?P<whole>\d{2,3})(?P<kind>[af]?)|(?P<major>\d{1,2})\.(?P<minor>\d)")


@dataclass(frozen=True)
class Selection:
    """Which backends of an op support one problem, and which one `auto` selects."""

    op: str
    problem: Problem
    why_not: dict[str, str | None]  # by backend; None: it supports the problem
    kernels: dict[str, str | None]  # by kernel of a backend with several: why `auto` skips it

    @property
    def chosen(self) -> str | None:
        """The backend that `auto` selects."""
        return next((backend for backend, reason in self.why_not.items() if reason is None), None)

    @property
    def kernel(self) -> str | None:
        """The kernel that the chosen backend selects, if it has several."""
        for name, reason in self.kernels.items():
            if name.startswith(f"{self.chosen}:") and reason is None:
                return name.partition(":")[2]
        return None

    def as_json(self) -> dict[str, object]:
        return {
            "op": self.op,
            "problem": str(self.problem),
            "chosen": self.chosen,
            "kernel": self.kernel,
            "why_not": self.why_not,
            "kernels": self.kernels,
        }


def parse_arch(text: str) -> int | None:
    """Return 90 for 90, 9.0, sm_90, sm_90a and H200, 0x942 for gfx942; None for cpu and 0.

    Raises ValueError for other text.
    """
    if text in ("cpu", "0"):
        return None
    named = amd_arch(text) or card_arch(text)
    if named is not None:
        return named
    found = ARCH.fullmatch(text.lower())
    arch = 0
    if found is not None:
        arch = int(found["whole"] or found["major"] + found["minor"])
    first_of_kind = {"a": 90, "f": 100}.get(found["kind"] or "", 0) if found else 0
    if arch not in CAPABILITIES or arch < first_of_kind:
        known = ", ".join(map(str, CAPABILITIES))
        raise ValueError(
            f"--arch must be cpu, a card ({', '.join(CARDS.values())}), a compute capability "
            f"written as 90, 9.0, sm_90 or sm_90a, or one of AMD's architectures such as gfx942, "
            f"got {text!r}; known: {known}"
        )
    return arch


def facts_of(op: str) -> set[str]:
    """The keywords of `problem_of` that apply to `op`. Raises ValueError for an unknown op."""
    specs(op)
    facts = {"dtype"}
    if op in HEADED_OPS:
        facts.add("heads")
    if op in CACHED_OPS:
        facts |= {"format", "page_size"}
    if op in MASKED_OPS:
        facts.add("mask")
    return facts


def problem_of(
    op: str,
    arch: int | None,
    *,
    model: str | None = None,
    dtype: str | None = None,
    format: str | None = None,
    heads: int | None = None,
    page_size: int = 64,
    mask: str | None = None,
) -> Problem:
    """A problem of `op` with the dimensions of a model: of DeepSeek-V3, of V3.2 for the indexer.

    `arch` None is the CPU; what else is None is of `ATTENTION_FACTS` or `INDEX_FACTS`, and the mask
    is that of the model.
    """
    known: dict[str, object] = dict(INDEX_FACTS if op in INDEX_OPS else ATTENTION_FACTS)
    sizes = MODEL
    if model is not None:
        sizes = MLAGeometry.from_config(model)
        if op in INDEX_OPS and not sizes.has_indexer:
            raise ValueError(f"model must have an indexer for {op}, got {model!r}")
        known["heads"] = sizes.index_n_heads if op in INDEX_OPS else sizes.num_heads
    if mask is None:
        mask = _index_mask(model) if op in INDEX_OPS and model is not None else "causal"
    named = {"dtype": dtype, "format": format, "heads": heads, "page_size": page_size, "mask": mask}
    known |= {name: value for name, value in named.items() if value is not None}
    known["format"] = ENGINE_NAMES.get(str(known["format"]), known["format"])
    for name, choices in (("dtype", DTYPES), ("format", FORMATS)):
        if known[name] not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {known[name]!r}")
    known["dtype"] = str(DTYPES[str(known["dtype"])])  # as in a call
    device = {"device": "cpu"} if arch is None else {"device": "cuda", "arch": arch}
    facts: dict[str, object] = {name: known[name] for name in known if name in facts_of(op)}
    if op in CACHED_OPS:
        if op in INDEX_OPS:
            facts["row"] = INDEX_KEYS if model is None else RowShape(sizes.index_head_dim, 0)
        else:
            is_v4 = model is None and known["format"] in V4_FORMATS
            facts["row"] = V4_ROW if is_v4 else sizes.row
    elif op == "scaled_mm_fp8":
        facts["product"] = PRODUCT
    elif op == "mla_prefill":
        facts["head_widths"] = (
            sizes.qk_nope_head_dim,
            sizes.qk_rope_head_dim,
            sizes.v_head_dim,
        )
    return Problem(**device, **facts)  # type: ignore[arg-type]


def _index_mask(model: str) -> str:
    """Return the mask of a model's index keys, each of which may stand for several tokens."""
    is_pooled = is_v4(model) or index_pool(config_fields(model)) > 1
    return "compressed_causal" if is_pooled else "causal"


def selection(op: str, problem: Problem) -> Selection:
    named = {name: reason for name, reason in explain_kernels(op, problem).items() if ":" in name}
    return Selection(op, problem, explain(op, problem), named)


def selections() -> list[list[Selection]]:
    """For every op: on the CPU, then on every architecture."""
    return [[selection(op, problem_of(op, arch)) for arch in (None, *CARDS)] for op in OPS]


def support_table(rows: list[list[Selection]], width: int) -> Table:
    cards = "; ".join(f"{arch_name(arch)} {names}" for arch, names in CARDS.items())
    cards = f"{cards}\n{_on_amd(rows)}\n{NOT_RUN}"
    headings = ("op", "cpu", *map(arch_name, NVIDIA))
    columns = [Column(heading, rank=i, is_number=False) for i, heading in enumerate(headings)]
    cells = ([row[0].op, *(each.chosen or "—" for each in row[: 1 + len(NVIDIA)])] for row in rows)
    return fitting_table(columns, cells, width, caption=cards, grouped=False)


def _on_amd(rows: list[list[Selection]]) -> str:
    """What the columns of AMD's architectures would say, for which the table has no room."""
    backends: dict[str, list[str]] = {}
    for row in rows:
        for each in row[1 + len(NVIDIA) :]:
            backends.setdefault(each.chosen or "—", []).append(each.op)
    said = (f"{name} for {', '.join(dict.fromkeys(ops))}" for name, ops in backends.items())
    if len(backends) == 1:
        said = (f"{name} for every op" for name in backends)
    return f"AMD: {'; '.join(said)}"


def markdown(rows: list[list[Selection]]) -> str:
    """The table in Markdown, as in the README."""
    cards = (f"{arch_name(arch)} ({names})" for arch, names in CARDS.items())
    headings = ["op", "cpu", *cards]
    lines = [headings, ["---"] * len(headings)]
    lines += [[f"`{row[0].op}`", *(each.chosen or "—" for each in row)] for row in rows]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", f"{NOT_RUN}."])


def explanation(each: Selection) -> Table:
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("backend", no_wrap=True)
    shown.add_column(f"{each.op} on {each.problem}", overflow="fold")
    for backend, reason in each.why_not.items():
        chosen = "[green]supported, selected by auto[/green]"
        shown.add_row(backend, reason or (chosen if backend == each.chosen else "supported"))
        own = {name: why for name, why in each.kernels.items() if name.startswith(f"{backend}:")}
        if reason is None or len(set(own.values())) > 1:
            for name, why in own.items():
                shown.add_row(name, why or "[green]selected kernel[/green]")
    return shown
