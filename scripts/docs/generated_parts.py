"""Parts of the documentation that are generated from the code at build time.

A page contains a marker line such as `<!-- generated: cli -->`. MkDocs calls `on_page_markdown`;
the functions themselves do not need MkDocs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from docstring_markdown import markdown_of
from links import api_entries, linked
from typer.main import get_command
from typer.testing import CliRunner

from mlakit import __version__
from mlakit.dispatch import knobs
from mlakit.dispatch.architectures import arch_name
from mlakit.formats import row_codec
from mlakit.model.geometry import PRESETS, MLAGeometry, RopeParameters
from mlakit.model.v4 import CSA, HCA, SLIDING, V4Config, is_v4
from mlakit.tools import bench, cli, support
from mlakit.tools.bench import peers
from mlakit.tools.memory.layers import LayerCounts, read_model

HELP_COLUMNS = 88  # the width of a page
SUITE = re.compile(r"^The suite `([a-z0-9-]+)`: ", flags=re.MULTILINE)
MARKER = re.compile(r"^<!-- generated: ([a-z]+) -->$", flags=re.MULTILINE)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def cli_reference() -> str:
    """Every command with its `--help` text."""
    commands = get_command(cli.app).commands
    runner = CliRunner(env={"COLUMNS": str(HELP_COLUMNS), "NO_COLOR": "1", "TERM": "dumb"})
    sections = []
    for words in ([], *([name] for name in commands)):
        shown = runner.invoke(cli.app, [*words, "--help"], prog_name="mlakit")
        if shown.exit_code != 0:
            raise RuntimeError(f"mlakit {' '.join(words)} --help failed: {shown.output}")
        text = "\n".join(line.rstrip() for line in shown.output.strip("\n").splitlines())
        sections.append(f"## {' '.join(['mlakit', *words])}\n\n```text\n{text.strip()}\n```")
    return "\n\n".join(sections)


def command_table() -> str:
    """Every command with the first line of its help."""
    commands = get_command(cli.app).commands
    rows = (
        (f"[`mlakit {name}`](cli.md#mlakit-{name})", _plain(command.help).split("\n\n")[0])
        for name, command in commands.items()
    )
    return markdown_table(("command", "what it does"), rows)


def _plain(markup: str) -> str:
    """Help text without terminal markup."""
    return re.sub(r"\[/?[a-z]+\]", "", markup)


def suite_methods() -> str:
    """The docstring of each suite of `mlakit bench`: workloads, bytes, FLOPs, checks."""
    found = {}
    for path in sorted(Path(bench.__path__[0]).glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        _, *parts = SUITE.split(text)
        for name, method in zip(parts[::2], parts[1::2], strict=True):
            method = method.strip()
            found[name] = f"### {name}\n\n{markdown_of(method[0].upper() + method[1:])}"
    return "\n\n".join(found[name] for name in sorted(found))


def peer_table() -> str:
    """The libraries that `mlakit bench` compares with."""
    rows = ((f"`{peer.name}`", peer.title) for peer in peers.PEERS)
    return markdown_table(("name", "library"), rows)


def knob_table() -> str:
    """Every environment variable mlakit reads."""
    shown = {True: "on", False: "off"}
    rows = (
        (f"`{knob.variable}`", shown.get(knob.default, knob.default), knob.meaning)
        for knob in knobs.REGISTRY.values()
    )
    return markdown_table(("variable", "default", "meaning"), rows)


def support_table() -> str:
    """The table of `mlakit support`."""
    header = ("op", "CPU", *map(arch_name, support.CARDS))
    rows = (
        (f"`{row[0].op}`", *(selection.chosen or "—" for selection in row))
        for row in support.selections()
    )
    names = ((arch_name(arch), names) for arch, names in support.CARDS.items())
    cards = "; ".join(f"{arch}: {cards}" for arch, cards in names)
    return f"{markdown_table(header, rows)}\n\n{cards}. {support.NOT_RUN}."


def _rotation(rope: RopeParameters) -> str:
    theta = f"θ = {rope.rope_theta:,.0f}".replace(",", " ")
    if rope.rope_type == "default":
        return theta
    if rope.factor is None or rope.factor == 1:
        return f"{rope.rope_type}, {theta}"
    return f"{rope.rope_type} × {rope.factor:g}, {theta}"


def model_table() -> str:
    """The geometries that are known by name."""
    header = ("name", "heads", "cache row", "expanded K, V", "softmax scale", "RoPE", "indexer")
    rows = (
        (
            f"`{name}`",
            model.num_heads,
            f"{model.kv_lora_rank} + {model.qk_rope_head_dim}",
            f"{model.qk_head_dim}, {model.v_head_dim}",
            f"{model.softmax_scale:.4f}",
            _rotation(model.rope_parameters),
            f"best {model.index_topk}" if model.has_indexer else "—",
        )
        for name, model in PRESETS.items()
    )
    return markdown_table(header, rows)


NOT_PATCHED = ("kimi-k3", "longcat-2.0")  # transformers 5.17 does not have these
# the rows, latent and rotated columns, that the tests of each plugin drive it with
ENGINE_ROWS = {"vLLM": ((512, 64), (256, 64), (512, 0)), "SGLang": ((512, 64),)}
NO_ENGINE = ("glm-5.3-flash",)  # the plugins refuse one index key for several tokens
NOT_VLLM = ("longcat-2.0",)  # its indexer has no first and last tokens


def _layers(name: str, counts: LayerCounts) -> str:
    if is_v4(name):
        kinds = V4Config.from_config(name).kinds
        named = {"window": SLIDING, "CSA": CSA, "HCA": HCA}
        return ", ".join(f"{kinds.count(kind)} {shown}" for shown, kind in named.items())
    of_all = f" of {counts.total}" if counts.mla < counts.total else ""
    indexers = f", {counts.indexer} with an indexer" if counts.indexer else ""
    return f"{counts.mla} MLA{of_all}{indexers}"


def _engines(name: str, model: MLAGeometry) -> str:
    row = (model.kv_lora_rank, model.qk_rope_head_dim)
    found = [engine for engine, rows in ENGINE_ROWS.items() if row in rows]
    if name in NO_ENGINE:
        return "—"
    if name in NOT_VLLM:
        found.remove("vLLM")
    backend = "MLAKIT_SPARSE" if model.has_indexer else "MLAKIT"
    return ", ".join(f"vLLM `{backend}`" if each == "vLLM" else each for each in found) or "—"


def _kernel(model: str, op: str, format: str) -> str:
    chosen = support.selection(op, support.problem_of(op, 90, model=model, format=format))
    return chosen.kernel or chosen.chosen or "—"


def attention_table() -> str:
    """For every known model its layers, its rows, and what runs its decode steps."""
    header = (
        *("name", "attention layers", "row, bytes", "op of a decode step"),
        *("kernels on an H200", "layer", "`patch`", "engines"),
    )
    rows = []
    for name, model in PRESETS.items():
        _, _, counts = read_model(name)
        fp8 = "fp8_block64" if is_v4(name) else "fp8_block128"
        formats = ("bf16", fp8)
        sizes = (str(row_codec(each, model.row).bytes_per_token) for each in formats)
        op = "sparse_mla" if model.has_indexer else "mla_decode"
        kernels = dict.fromkeys(_kernel(name, op, each) for each in formats)
        rows.append(
            (
                f"`{name}`",
                _layers(name, counts),
                " bf16, ".join(sizes) + f" `{fp8}`",
                f"`{op}`",
                ", ".join(f"`{each}`" for each in kernels),
                "`V4Attention`" if is_v4(name) else "`MLAAttention`",
                "—" if name in NOT_PATCHED else "yes",
                _engines(name, model),
            )
        )
    return markdown_table(header, rows)


GENERATORS: dict[str, Callable[[], str]] = {
    "cli": cli_reference,
    "commands": command_table,
    "suites": suite_methods,
    "peers": peer_table,
    "knobs": knob_table,
    "support": support_table,
    "models": model_table,
    "attention": attention_table,
}


def filled(markdown: str) -> str:
    """A page with its markers replaced. Raises KeyError for an unknown marker."""
    return MARKER.sub(lambda match: GENERATORS[match[1]](), markdown)


def on_config(config: Any) -> Any:
    """Called by MkDocs first: the site says of which version it is."""
    config.site_name = f"{config.site_name} {__version__}"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with the text of every page: fills markers and links names."""
    return linked(filled(markdown), api_entries(), page.file.src_uri)
