"""The page on scaling has what its commands print."""

from __future__ import annotations

import re

import pytest
import scaling_page

from tests.paths import ROOT

TEXT = scaling_page.PAGE.read_text(encoding="utf-8")
SHOWN = scaling_page.SHOWN.findall(TEXT)
PLOTS = scaling_page.plots(TEXT)


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_command_prints_what_the_page_shows(command, shown):
    # if it differs: python scripts/docs/scaling_page.py
    assert shown == scaling_page.printed(command)


def test_the_page_has_every_command_and_its_plots():
    named = {command.split()[1] for command, _ in SHOWN}
    assert named == {"vllm-args", "memory", "plan-cluster"}
    assert {command.split()[1] for command in PLOTS.values()} == {"memory", "plan-cluster"}


@pytest.mark.parametrize("file", PLOTS)
def test_the_plot_is_that_of_its_command(file, tmp_path):
    made = tmp_path / "plot.svg"
    scaling_page.run(PLOTS[file].replace(file, str(made)))
    assert made.read_text(encoding="utf-8") == (ROOT / file).read_text(encoding="utf-8")
    assert f"]({file.removeprefix('docs/')})" in TEXT


def test_a_serve_line_is_continued_without_a_change():
    line = "vllm serve x " + " ".join(f"--option-{i} value" for i in range(20))
    shown = scaling_page._continued(line)
    assert max(map(len, shown.splitlines())) <= scaling_page.COLUMNS
    assert re.sub(r" \\\n +", " ", shown) == line
