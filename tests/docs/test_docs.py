"""The pages are true: examples run, links lead somewhere, numbers are those of the code.

None of this needs MkDocs; `make docs` builds the site.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import generated_parts
import pytest
import torch
from typer.testing import CliRunner

from mlakit.compat import flash_mla, modular
from mlakit.dispatch import selection
from mlakit.dispatch.specs import Use
from mlakit.formats import FORMATS, PageFooterCodec, row_codec
from mlakit.kernels.hopper import support as hopper
from mlakit.model.geometry import MLAGeometry, RowShape
from mlakit.tools import cli
from tests.docs.snippets import (
    FENCE,
    angles_by_hand,
    boasts,
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
PICTURES = sorted((DOCS / "img").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _no_drop_in_left_behind():
    yield
    flash_mla.uninstall()


@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_and_print_what_they_say(name):
    assert output_of(EXAMPLES[name].code, name) == EXAMPLES[name].printed


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_end_in_a_check_or_a_printed_value(name):
    assert ends_in_a_check(EXAMPLES[name])
    assert len(EXAMPLES[name].code.splitlines()) <= 25


def test_examples_take_their_angles_from_the_model():
    rotating = {name for name, example in EXAMPLES.items() if "freqs" in example.code}
    assert {name.partition(":")[0] for name in rotating} >= {"quickstart.md", "max.md"}
    assert not [name for name in rotating if angles_by_hand(EXAMPLES[name].code)]
    assert angles_by_hand("angle = p * f\nfreqs = torch.stack([angle.cos(), angle.sin()], -1)")


def test_the_quick_start_appends_decodes_steps_and_wraps_a_foreign_cache():
    code = "\n".join(each.code for name, each in EXAMPLES.items() if "quickstart" in name)
    for call in ("norm_rope_quant_append(", "mla_decode(", "mla_step(", "sparse_mla(", ".wrap("):
        assert call in code


def test_the_pages_that_teach_have_examples():
    taught = {name.partition(":")[0] for name in EXAMPLES}
    pages = (
        "quickstart layer transformers parallel concepts formats backends flash_mla flashinfer max"
    )
    assert taught == {f"{page}.md" for page in pages.split()}


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
    assert sorted(re.findall(r"- (\S+\.md)$", nav, flags=re.MULTILINE)) == sorted(PAGES)


COLUMNS = 100  # of code, for which docs/stylesheets/width.css makes room at 1280 pixels


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_code_is_wider_than_a_page(page):
    filled = generated_parts.filled(PAGES[page])
    lines = "".join(match[2] for match in FENCE.finditer(filled)).splitlines()
    assert [line for line in lines if len(line) > COLUMNS] == []


def test_the_site_can_be_searched_when_it_is_opened_from_a_folder():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^plugins:\n  - search\n  - offline\b", config, flags=re.MULTILINE)
    assert "use_directory_urls: false" in config
    for key in ("extra_css:", "extra:\n  polyfills:"):
        (file,) = re.findall(rf"^{key}\n +- (\S+)", config, flags=re.MULTILINE)
        assert (DOCS / file).is_file()
    # the offline plugin leaves out its own, which another server has, if it finds this name
    assert "iframe-worker" in file
    assert "https://" not in config


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_used_titled_and_has_colours_for_the_dark(path):
    assert any(f"](img/{path.name})" in text for text in PAGES.values())
    picture = ET.parse(path).getroot()
    assert picture.findtext(f"{SVG}title")
    light, _, dark = picture.findtext(f"{SVG}style").partition(
        "@media (prefers-color-scheme: dark)"
    )
    used = {word for each in picture.iter() for word in each.get("class", "").split()}
    assert used <= set(re.findall(r"\.(\w+) \{", light))
    filled = {name for name in used if re.search(rf"\.{name} {{ fill: #", light)}
    assert filled <= set(re.findall(r"\.(\w+) \{", dark))


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


def test_the_pages_name_commands():
    named = {arguments[0] for arguments in commands()}
    assert {"demo", "bench", "explain", "support", "memory", "doctor", "check"} <= named


def test_the_pages_keep_to_what_was_measured():
    for page, text in PAGES.items():
        assert boasts(text) == [], page


def test_a_speed_needs_a_figure():
    assert boasts("It is 1.2x faster than FlashMLA.") == []
    assert boasts("It is faster than FlashMLA.") == ["faster than flashmla"]
    assert boasts("A speedup.") == ["a speedup"]


def test_the_ops_that_hopper_is_said_to_have_kernels_of_are_those_it_has():
    ops = {spec.op for spec in selection.SPECS if spec.backend == "hopper"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for text in (PAGES["backends.md"], readme):
        (devices,) = (row[1] for row in table(text, "backend") if row[0] == "hopper")
        assert {op for op in selection.OPS if op in devices} == ops
    said = PAGES["index.md"].partition("- Only four ops have kernels for one")[2]
    said = said.partition("Portable")[0]
    assert {op for op in selection.OPS if f"`{op}`" in said} == ops


def test_what_the_hopper_kernel_is_said_to_take_is_what_it_takes():
    said = dict(table(PAGES["backends.md"], "argument"))
    columns, values, *pages = numbers(re.sub(r"[a-z]+\d+", "", said["cache"]))
    assert ((columns, values), pages) == (hopper.ROW, [*hopper.PAGES, hopper.BLOCK])
    assert said["cache"].startswith(f"rows of {' or '.join(hopper.FORMATS)}, ")
    decode = next(spec for spec in hopper.SPECS if spec.op == "mla_decode")
    assert said["mask"] == " or ".join(decode.masks)


def test_the_decode_kernels_of_hopper_are_named():
    named = [row[0].strip("`") for row in table(PAGES["backends.md"], "kernel")]
    kernels = {spec.kernel for spec in hopper.SPECS if spec.op == "mla_decode"}
    assert (set(named), len(named)) == (kernels, len(kernels))


def test_what_the_prefill_kernel_is_said_to_take_is_what_it_takes():
    said = dict(table(PAGES["backends.md"], "argument of `mla_prefill`"))
    names = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "e4m3": hopper.E4M3}
    assert tuple(names[name] for name in said["dtype"].split(" or ")) == hopper.PREFILL_DTYPES
    widths = re.findall(r"\d+\+\d+\+\d+", said["widths D_N+D_R+D_V"])
    widths = [tuple(numbers(each)) for each in widths]
    assert widths == list(hopper.PREFILL_WIDTHS)
    assert set(hopper.FP8_PREFILL_WIDTHS) == {w for w in widths if (w[0], w[2]) == (128, 128)}


def test_the_words_for_what_few_kernels_take_are_those_of_the_code():
    words = [row[0] for row in table(PAGES["backends.md"], "word")]
    assert sorted(words) == sorted(map(str, Use))


def test_the_saving_is_that_of_the_geometry():
    model = MLAGeometry.preset("deepseek-v3")
    row = row_codec("bf16", model.row).bytes_per_token
    expanded = 2 * model.expanded_elements_per_token
    said = f"{row} bytes per token and layer in place of {expanded}, {expanded // row} times fewer"
    assert said in " ".join(PAGES["concepts.md"].split())
    drawn = (DOCS / "img" / "cache.svg").read_text(encoding="utf-8")
    assert f">{expanded} bytes per token and layer in bf16<" in drawn
    assert f">{row} bytes per token and layer in bf16<" in drawn


def test_the_format_table_gives_the_bytes_of_the_code():
    found = []
    for names, columns, size, _ in table(PAGES["formats.md"], "format"):
        for name in names.split(", "):
            codec = row_codec(name, RowShape(*numbers(columns)))
            beside = codec.scale_elements * (codec.scale_dtype.itemsize if codec.scale_dtype else 0)
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


@pytest.mark.parametrize("format", LAYOUTS)
def test_the_picture_of_the_formats_has_the_bytes_of_the_table(format):
    picture = ET.parse(DOCS / "img" / "formats.svg").getroot()
    (drawn,) = picture.findall(f"{SVG}g[@data-format='{format}']")
    fields = [
        (each.get("class"), int(each.get("data-bytes"))) for each in drawn.findall(f"{SVG}rect")
    ]
    assert fields == [(name.removesuffix("s"), size) for name, _, size in LAYOUTS[format]]


def test_pages_of_footers_are_laid_out_as_said():
    codec = row_codec("fp8_block64", row_of("fp8_block64"))
    assert isinstance(codec, PageFooterCodec)
    text = " ".join(PAGES["formats.md"].split())
    rows, scales = codec.payload_elements, codec.footer_bytes
    assert f"row t at `{rows} · t`, its scales at `{rows} · page_size + {scales} · t`" in text
    assert f"a multiple of {rows} bytes" in text
    assert codec.page_bytes(7) % rows == 0


@pytest.mark.parametrize(("page", "module"), [("flash_mla.md", flash_mla), ("max.md", modular)])
def test_the_page_of_a_library_names_all_its_functions(page, module):
    text = PAGES[page]
    assert [name for name in module.__all__ if not re.search(rf"`{name}\b", text)] == []
