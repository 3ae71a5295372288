"""The reference is whole: every public name has an entry, every command its help; all readable."""

from __future__ import annotations

import importlib
import inspect
import re
from types import SimpleNamespace

import generated_parts
import pytest
import reference
from docstring_markdown import markdown_of, trailing_comment
from links import ENTRY, anchor, api_entries, linked
from torch import nn
from typer.main import get_command

import mlakit
from mlakit import RowShape, UnsupportedError
from mlakit.dispatch import knobs, selection
from mlakit.layer.config import LayerConfig
from mlakit.model.geometry import PRESETS
from mlakit.tools import cli
from tests.integrations.sglang import driver as sglang_driver
from tests.integrations.vllm import shapes as vllm_shapes
from tests.paths import ROOT

PAGES = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").rglob("*.md"))
}
ENTRIES = [name for text in PAGES.values() for name, _ in ENTRY.findall(text)]
# of these modules every public name has an entry
WHOLE_MODULES = (
    "mlakit",
    "mlakit.ops",
    "mlakit.cache",
    "mlakit.cache.pages",
    "mlakit.plan",
    "mlakit.model.masks",
    "mlakit.model.geometry",
    "mlakit.formats.rows",
    "mlakit.steps",
    "mlakit.layer",
    "mlakit.parallel",
    "mlakit.steps.weights",
    "mlakit.compat.flash_mla",
    "mlakit.compat.flashinfer",
    "mlakit.compat.modular",
    "mlakit.tools.workloads",
    "mlakit.tools.testing",
    "mlakit.reference",
)


def resolved(path: str) -> object:
    """The object that an entry names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def public_names(module: str) -> list[str]:
    """`__all__`, or what is defined there under a name without underscore."""
    loaded = importlib.import_module(module)
    defined = [
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    ]
    return [name for name in getattr(loaded, "__all__", defined) if name != "__version__"]


def test_every_entry_names_something_and_none_is_there_twice():
    for entry in ENTRIES:
        assert resolved(entry) is not None
    assert len(set(ENTRIES)) == len(ENTRIES)


def test_the_committed_reference_is_as_the_code_has_it():
    assert [path.name for path in reference.stale()] == [], "run `make reference`"


def test_a_changed_signature_makes_a_page_stale():
    page = "<!-- api: mlakit.merge_states -->\n<!-- end -->"
    written = reference.filled(page)
    assert "outs, lses, *, sink=None," in written
    assert reference.filled(written) == written
    assert reference.filled(written.replace("sink=None", "sink=0")) == written


def test_public_names_have_an_example_that_is_run():
    shown = reference.examples()
    without = {name for name in ENTRIES if id(resolved(name)) not in shown}
    assert {name for name in without if name.count(".") == 1} == set()
    # the oracles take the arguments of the ops, and MAX's functions have a script in examples/
    others = ("mlakit.reference.", "mlakit.compat.modular.", "mlakit.parallel.sum_over_ranks")
    functions = {name for name in without if inspect.isroutine(resolved(name))}
    assert {name for name in functions if not name.startswith(others)} == set()


def test_an_example_is_found_by_what_it_uses_and_not_by_a_word():
    code = "import mlakit\nfrom mlakit import reference as r\nr.mla_decode\nx.mla_prefill"
    used = list(reference._used(code))
    oracle = resolved("mlakit.reference.mla_decode")
    assert any(each is oracle for each in used)
    for other in ("mlakit.mla_decode", "mlakit.mla_prefill"):
        assert not any(each is resolved(other) for each in used)


def test_every_argument_of_an_op_is_described_with_shape_and_dtype():
    results = {"out", "lse", "scales"}  # described by what the op returns
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in PAGES["api/ops.md"].splitlines()
        if line.startswith("| `")
    ]
    arguments = [row for row in rows if len(row) == 5]
    assert len(arguments) > 90
    for name, kind, shape, dtype, text in arguments:
        assert text, name
        if kind.startswith("`Tensor") and name.strip("`") not in results:
            assert shape, name
            assert dtype or "out_dtype" in text, name


@pytest.mark.parametrize("module", WHOLE_MODULES)
def test_every_public_name_has_an_entry(module):
    described = [resolved(entry) for entry in ENTRIES]
    missing = [
        name
        for name in public_names(module)
        if not any(each is resolved(f"{module}.{name}") for each in described)
    ]
    assert missing == []


def members(entry: str) -> dict[str, object]:
    """What is documented under an entry: itself, and the public methods of a class."""
    described = resolved(entry)
    found = {entry: described}
    if inspect.isclass(described):
        for name, value in inspect.getmembers(described):
            if value is getattr(nn.Module, name, None):
                continue  # torch's own
            if not name.startswith("_") and (callable(value) or isinstance(value, property)):
                found[f"{entry}.{name}"] = value
    return {name: value for name, value in found.items() if callable(value) or name != entry}


@pytest.mark.parametrize("entry", ENTRIES)
def test_everything_public_says_what_it_does(entry):
    silent = [name for name, value in members(entry).items() if not inspect.getdoc(value)]
    assert silent == []


def test_every_marker_can_be_filled_and_every_generator_is_used():
    used = {name for text in PAGES.values() for name in generated_parts.MARKER.findall(text)}
    assert used == set(generated_parts.GENERATORS)
    with pytest.raises(KeyError, match="nothing"):
        generated_parts.filled("<!-- generated: nothing -->")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="notes/cpu.md"))
    assert generated_parts.on_page_markdown("# A", page=page) == "# A"
    shown = generated_parts.on_page_markdown("As `mla_decode` does.", page=page)
    assert shown == "As [`mla_decode`](../api/ops.md#mla_decode) does."


def test_the_site_says_its_version():
    config = generated_parts.on_config(SimpleNamespace(site_name="mlakit"))
    assert config.site_name == f"mlakit {mlakit.__version__}"


@pytest.mark.slow
def test_the_commands_are_all_there_with_their_options():
    text = generated_parts.cli_reference()
    for name, command in get_command(cli.app).commands.items():
        _, _, section = text.partition(f"## mlakit {name}\n")
        section = section.partition("\n## ")[0]
        for parameter in command.params:
            shown = (
                parameter.opts[-1] if parameter.param_type_name == "option" else parameter.metavar
            )
            assert (shown or parameter.name.upper()) in section, (name, parameter.name)
    assert max(len(line) for line in text.splitlines()) <= generated_parts.HELP_COLUMNS
    assert "\x1b" not in text


def test_generated_tables_have_a_row_for_everything():
    rows = {
        name: re.findall(r"^\| `([^`]+)`", make(), flags=re.MULTILINE)
        for name, make in generated_parts.GENERATORS.items()
        if name not in ("cli", "commands", "suites")
    }
    assert rows["knobs"] == [knob.variable for knob in knobs.REGISTRY.values()]
    assert rows["support"] == list(selection.OPS)
    assert rows["models"] == rows["attention"] == list(PRESETS)


def test_the_table_of_attention_claims_what_the_tests_have():
    lines = generated_parts.attention_table().splitlines()[2:]
    for line in lines:
        name, *_, layer, _, engines = (cell.strip("`") for cell in line.strip("| ").split(" | "))
        model = PRESETS[name]
        try:
            config = LayerConfig.from_config(name)
        except UnsupportedError:
            assert (layer, engines) == ("V4Attention", "—")
            continue
        assert layer == "MLAAttention"
        row = RowShape(model.kv_lora_rank, model.qk_rope_head_dim)
        assert ("SGLang" in engines) == (row == sglang_driver.ROW and config.index_pool == 1)
        is_like_vllms = config.index_pool == 1 and not config.init_tokens
        is_driven = row in (vllm_shapes.ROW, *vllm_shapes.OTHER_ROWS)
        assert ("vLLM" in engines) == (is_driven and is_like_vllms)


DOCSTRING = """Attend.

    score = q·row        out = softmax(score)

    lse = log Σ

q        [tokens, D_C], 2**-3
kv_shard (rank, world): tokens of this rank,
         in order
first, second
         both of them
Returns out, where a * b < c.

A sentence with `code`  is no column.
"""


def test_columns_become_a_list_and_equations_code():
    assert markdown_of(DOCSTRING) == (
        "Attend.\n\n"
        "```text\nscore = q·row        out = softmax(score)\n\nlse = log Σ\n```\n\n"
        "`q`\n:   [tokens, D_C], 2\\*\\*-3\n\n"
        "`kv_shard`\n:   (rank, world): tokens of this rank, in order\n\n"
        "`first, second`\n:   both of them\n\n"
        "Returns out, where a \\* b \\< c.\n\n"
        "A sentence with `code`  is no column."
    )


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_column_is_left_in_the_text_of_an_entry(entry):
    for name, value in members(entry).items():
        prose = re.sub(r"```text\n.*?```", "", markdown_of(inspect.getdoc(value)), flags=re.DOTALL)
        left = [
            line
            for line in prose.splitlines()
            if re.search(r"\S {2,}\S", line) and not line.startswith(":   ")
        ]
        assert left == [], name


def test_names_become_links_outside_code_links_and_headings():
    names = {"mla_decode": "api/ops.md#mla_decode"}
    fenced = "```python\n`mla_decode`\n```\n"
    text = f"# `mla_decode`\n`mla_decode`, `other`, [`mla_decode`](x.md)\n{fenced}"
    expected = text.replace("\n`mla_decode`,", "\n[`mla_decode`](api/ops.md#mla_decode),")
    assert linked(text, names) == expected
    assert linked("`mla_decode`", names, "api/ops.md") == "[`mla_decode`](ops.md#mla_decode)"


def test_a_short_name_is_that_of_the_op_and_every_name_has_an_entry():
    names = api_entries()
    assert names["mla_decode"] == names["mlakit.mla_decode"] == "api/ops.md#mla_decode"
    assert names["rms_norm"] == "api/reference.md#rms_norm"
    assert {name for name in names if "." in name} == set(ENTRIES)


def test_each_link_to_the_reference_leads_to_a_heading():
    for name, target in api_entries().items():
        page, _, heading = target.partition("#")
        headings = re.findall(r"^#+ (.*)$", PAGES[page], flags=re.MULTILINE)
        assert [anchor(each) for each in headings].count(heading) == 1, name


def test_a_method_with_a_description_has_a_table_of_its_arguments():
    page = PAGES["api/pages.md"]
    assert "[`.append(sequence, num_tokens)`](#pageallocatorappend)" in page
    section = page.partition("### PageAllocator.append\n")[2].partition("\n### ")[0]
    assert "append(sequence, num_tokens) -> list[PageCopy]" in section
    assert "| `num_tokens` | `int` |" in section


def test_a_field_is_described_by_the_comment_behind_it():
    assert trailing_comment("    rows: Tensor  # [tokens, topk]") == "[tokens, topk]"
    assert trailing_comment("    rope: str = '#'") == ""
    assert trailing_comment("    rows: Tensor = field(") == ""
