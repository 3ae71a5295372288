"""The README is true: its examples run, its tables and commands are those of the code."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from mlakit import ops
from mlakit.tools import cli
from tests.docs.snippets import (
    FENCE,
    ends_in_a_check,
    examples,
    output_of,
    table,
)
from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [(match[1], match[2]) for match in FENCE.finditer(README)]


EXAMPLES = examples(README)


@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize("heading", EXAMPLES)
def test_examples_run_and_print_what_they_say(heading):
    code, expected = EXAMPLES[heading]
    assert output_of(code, f"README.md, {heading}") == expected


@pytest.mark.parametrize("heading", EXAMPLES)
def test_examples_end_in_a_check_or_a_printed_value(heading):
    assert ends_in_a_check(EXAMPLES[heading])


def test_op_table_names_every_op():
    public = {name for name in ops.__all__ if name.islower()}
    assert {name for name, _ in table(README, "op")} == public


def shell_commands() -> list[list[str]]:
    blocks = "".join(code for language, code in BLOCKS if language == "sh")
    inline = "\n".join(re.findall(r"`((?:make|pip|mlakit) [^`]*)`", README))
    lines = (blocks + inline).splitlines()
    return [line.partition("#")[0].split() for line in lines if line.strip()]


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    return targets & set(" ".join(phony).split())


@pytest.mark.slow
def test_shell_commands_exist():
    for program, *arguments in shell_commands():
        if program == "make":
            assert set(arguments) <= make_targets()
        elif program == "mlakit":
            assert CliRunner().invoke(cli.app, [*arguments, "--help"]).exit_code == 0


def test_the_kernels_of_sm_90_are_those_of_the_command():
    rows = json.loads(CliRunner().invoke(cli.app, ["support", "--json"]).output)
    on_gpus = [each for row in rows for each in row if not each["problem"].startswith("cpu")]
    assert {each["chosen"] for each in on_gpus} == {"hopper", "triton"}
    assert all("sm_90" in each["problem"] for each in on_gpus if each["chosen"] == "hopper")
    hopper = {each["op"] for each in on_gpus if each["chosen"] == "hopper"}
    (line,) = (line for line in README.splitlines() if line.startswith("| `hopper` | sm_90"))
    assert hopper == set(re.findall(r"`([a-z_]+)`", line)) - {"hopper"}
    assert len(hopper) == 4


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        path, _, heading = target.partition("#")
        path = path or "README.md"
        assert (ROOT / path).exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings]
            assert heading in slugs, target


def test_the_gains_of_a_patched_model_are_those_measured():
    measured = json.loads((ROOT / "docs" / "data" / "h200-transformers.json").read_text())
    times = {(row["workload"], row["implementation"]): row["p50_us"] for row in measured["rows"]}
    caches = {(row["workload"], row["implementation"]): row["cache"] for row in measured["memory"]}
    v3, sparse = (f"transformers-{model}-b8-h128-8192" for model in ("v3", "v3.2"))
    gains = [
        times[workload, "eager"] / times[workload, f"mlakit{graph}"]
        for workload in (sparse, v3)
        for graph in ("", ", CUDA graph")
    ]
    sparse_gain, in_graph, dense_gain, dense_in_graph = gains
    smaller, larger = (caches[sparse, each] / 1e9 for each in ("mlakit", "eager"))
    said = (
        f"decode {sparse_gain:.1f} times as fast as eager on an H200, and {in_graph:.0f} times in",
        f"it is {dense_gain:.1f} and {dense_in_graph:.0f} times",
        f"{smaller:.2f} GB instead of {larger:.1f} GB",
    )
    text = " ".join(README.split())
    assert [each for each in said if each not in text] == []
