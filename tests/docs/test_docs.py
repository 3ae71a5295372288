"""The pages are true: examples run, links lead somewhere, numbers are those of the code.

None of this needs MkDocs; `make docs` builds the site.
"""

from __future__ import annotations

import re

import generated_parts
import pytest
import torch
from typer.testing import CliRunner

from mlakit.compat import flash_mla, flashinfer, modular
from mlakit.dispatch.specs import Use
from mlakit.formats import FORMATS, row_codec
from mlakit.kernels.hopper import support as hopper
from mlakit.model.geometry import RowShape
from mlakit.tools import cli
from tests.docs.snippets import (
    FENCE,
    ends_in_a_check,
    examples,
    numbers,
    output_of,
    table,
)
from tests.paths import ROOT

DOCS = ROOT / "docs"

PAGES = {
    path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md"))
}
EXAMPLES = {
    f"{page}: {heading}": example
    for page, text in PAGES.items()
    for heading, example in examples(text).items()
}


@pytest.fixture(autouse=True)
def _no_drop_in_left_behind():
    yield
    flash_mla.uninstall()
    flashinfer.uninstall()


@pytest.mark.slow
@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_and_print_what_they_say(name):
    assert output_of(EXAMPLES[name].code, name) == EXAMPLES[name].printed


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_end_in_a_check_or_a_printed_value(name):
    assert ends_in_a_check(EXAMPLES[name])


def test_an_example_is_read_with_its_output():
    text = "# A\n```python\nprint(1)\n```\n\n```text\n1\n```\n# B\n```text\nx\n```\n"
    found = examples(text)
    assert list(found) == ["A"]
    assert output_of(found["A"].code, "A") == found["A"].printed == "1\n"
    assert ends_in_a_check(found["A"])
    assert not ends_in_a_check(found["A"]._replace(printed=""))


def anchors(markdown: str) -> set[str]:
    """The anchors MkDocs gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", markdown), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def broken_links(page: str, text: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (DOCS / page).parent / file if file else DOCS / page
        is_there = path.is_file()
        if is_there and anchor:
            text_there = generated_parts.filled(path.read_text(encoding="utf-8"))
            is_there = anchor in anchors(text_there)
        if not is_there:
            broken.append(target)
    return broken


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_links_and_images_exist(page):
    assert broken_links(page, PAGES[page]) == []


def test_the_link_checker_sees():
    text = "[a](nowhere.md) [b](concepts.md#nothing) ![c](img/none.svg) [d](concepts.md#pages)"
    assert broken_links("index.md", text) == ["nowhere.md", "concepts.md#nothing", "img/none.svg"]


def test_the_navigation_has_every_page_once():
    _, _, nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    assert sorted(re.findall(r"[-:] (\S+\.md)$", nav, flags=re.MULTILINE)) == sorted(PAGES)


def commands() -> list[list[str]]:
    """Every command line of mlakit that a page names, in its examples and in its text."""
    found = []
    for text in PAGES.values():
        shown = "".join(match[2] for match in FENCE.finditer(text) if match[1] == "sh")
        inline = "\n".join(re.findall(r"`(mlakit [a-z][^`]*)`", FENCE.sub("", text)))
        lines = (line.partition("#")[0] for line in f"{shown}\n{inline}".splitlines())
        found += [line.split()[1:] for line in lines if line.startswith("mlakit ")]
    return sorted({tuple(each) for each in found})


@pytest.mark.slow
@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_a_command_that_a_page_names_exists_with_its_options(arguments):
    # COLUMNS: a narrow table would break the names of options
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [arguments[0], "--help"])
    assert shown.exit_code == 0, f"there is no mlakit {arguments[0]}"
    options = {word for word in arguments if word.startswith("--")}
    assert options <= set(re.findall(r"--[a-z-]+", shown.output))


def test_the_decode_kernels_of_hopper_are_named():
    named = [row[0].strip("`") for row in table(PAGES["backends.md"], "kernel")]
    kernels = {spec.kernel for spec in hopper.SPECS if spec.op == "mla_decode"}
    assert (set(named), len(named)) == (kernels, len(kernels))


def test_the_words_for_what_few_kernels_take_are_those_of_the_code():
    words = [row[0] for row in table(PAGES["backends.md"], "word")]
    assert sorted(words) == sorted(map(str, Use))


def test_the_format_table_gives_the_bytes_of_the_code():
    found = []
    for names, columns, size, _ in table(PAGES["formats.md"], "format"):
        for name in names.split(", "):
            codec = row_codec(name, RowShape(*numbers(columns)))
            beside = codec.beside_elements * (
                codec.beside_dtype.itemsize if codec.beside_dtype else 0
            )
            payload = codec.bytes_per_token - beside
            assert numbers(size) == ([payload, beside] if beside else [payload]), name
            found.append(name)
    assert tuple(found) == FORMATS


# of every format in the table of bytes: (field, first byte or None, bytes)
LAYOUTS: dict[str, list[tuple[str, int | None, int]]] = {}
for _format, _field, _first, _size, _ in table(
    PAGES["formats.md"].partition("## Byte by byte")[2], "format"
):
    _place = None if _first == "beside" else int(_first)
    LAYOUTS.setdefault(_format, []).append((_field, _place, int(_size)))


def row_of(format: str) -> RowShape:
    return RowShape(448, 64, 512) if format == "fp8_block64" else RowShape(512, 64)


def stored_bytes(format: str, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    payload, scales = row_codec(format, row_of(format)).encode(row)
    beside = torch.empty(0, dtype=torch.uint8) if scales is None else scales.view(torch.uint8)
    return payload.view(torch.uint8), beside


@pytest.mark.parametrize("format", LAYOUTS)
def test_the_fields_of_a_row_lie_where_the_table_says(format):
    row = row_of(format)
    before, _ = stored_bytes(format, torch.full((row.width,), 2.0))
    fields = [(name, first, size) for name, first, size in LAYOUTS[format] if first is not None]
    assert [first for _, first, _ in fields] == [
        sum(size for _, _, size in fields[:i]) for i in range(len(fields))
    ]
    assert sum(size for _, _, size in fields) == len(before)
    where = {name: slice(first, first + size) for name, first, size in fields}
    halved = torch.full((row.width,), 2.0)
    halved[1 : row.kv_lora_rank : 2] = 1.0  # column 0 and the scales stay as they are
    latent, _ = stored_bytes(format, halved)
    halved = torch.full((row.width,), 2.0)
    halved[row.kv_lora_rank :] = 1.0
    rope, _ = stored_bytes(format, halved)
    for name, changed in (("latent", latent), ("rope", rope)):
        places = (changed != before).nonzero().flatten()
        assert len(places) > 0
        assert where[name].start <= places.min()
        assert places.max() < where[name].stop
    assert (rope != before).nonzero().max() >= where["rope"].stop - 2


@pytest.mark.parametrize("format", LAYOUTS)
def test_scales_lie_where_the_table_says(format):
    row = row_of(format)
    before, beside = stored_bytes(format, torch.full((row.width,), 2.0))
    after, beside_after = stored_bytes(format, torch.full((row.width,), 4.0))
    scales = [(first, size) for name, first, size in LAYOUTS[format] if name.startswith("scale")]
    assert sum(size for first, size in scales if first is None) == len(beside)
    if not scales:
        assert len(beside) == 0
    for first, size in scales:
        old, new = (beside, beside_after) if first is None else (before, after)
        place = slice(None) if first is None else slice(first, first + size)
        assert (old[place] != new[place]).any()


@pytest.mark.parametrize(
    ("page", "module"),
    [("flash_mla.md", flash_mla), ("flashinfer.md", flashinfer), ("max.md", modular)],
)
def test_the_page_of_a_library_names_all_its_functions(page, module):
    text = PAGES[page]
    assert [name for name in module.__all__ if not re.search(rf"`{name}\b", text)] == []


def test_the_site_has_a_logo_and_leads_to_the_repository_without_asking_it():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (logo,) = re.findall(r"^  logo: (\S+)$", config, flags=re.MULTILINE)
    assert (DOCS / logo).is_file()
    (repository,) = re.findall(r"^repo_url: (\S+)$", config, flags=re.MULTILINE)
    assert f'"{repository}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    link = (ROOT / "scripts/docs/theme/partials/source.html").read_text(encoding="utf-8")
    assert "config.repo_url" in link
    assert "data-md-component" not in link  # with it the page would ask GitHub for stars
