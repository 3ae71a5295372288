"""The shorter lists of compile checks: every kernel is in them, and CI compiles everything once."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from mlakit.dispatch import selection
from mlakit.tools import cli
from mlakit.tools.compile import compilation, configurations, samples
from mlakit.tools.compile.compilation import NUM_SMS
from tests.kernels.selection import selected_kernel


def selected(monkeypatch: pytest.MonkeyPatch, configuration: str) -> str:
    """The Hopper kernel that a configuration launches."""
    arch = configurations.HOPPER_ARCH
    case = configurations.HOPPER[configuration]
    return selected_kernel(monkeypatch, case, arch, num_sms=NUM_SMS[arch])


@pytest.mark.slow
def test_a_sample_has_every_hopper_kernel(monkeypatch):
    found = {selected(monkeypatch, name) for name in samples.OF_HOPPER}
    assert found == {str(spec) for spec in selection.SPECS if spec.backend == "hopper"}
    assert len(samples.OF_HOPPER) < len(configurations.HOPPER) / 4


def test_a_sample_has_every_portable_op():
    ops = {configurations.CONFIGURATIONS[name].op for name in samples.OF_PORTABLE}
    assert ops == set(selection.OPS)


def test_of_the_other_part_nothing_is_left_out():
    hopper, portable = (set(samples.checks_with_sample(part)) for part in samples.PARTS)
    blackwell = {each for each in configurations.named_checks() if each[1] == 103}
    assert (hopper | portable) - blackwell == {
        *((name, arch) for name, arch in configurations.named_checks() if arch != 103),
        *((name, configurations.HOPPER_ARCH) for name in samples.OF_PORTABLE),
    } - {(name, 100) for name, _ in hopper & blackwell}
    in_hopper = {each for each in hopper | portable if each[0] in configurations.HOPPER}
    assert in_hopper <= portable  # every configuration of Hopper, where the others are sampled
    assert hopper & in_hopper == {(name, 90) for name in samples.OF_HOPPER}
    assert {name for name, arch in portable if arch != 90} == set()
    for checks in map(samples.checks_with_sample, samples.PARTS):
        assert len(checks) == len(set(checks))


def test_blackwells_architectures_take_turns(monkeypatch):
    monkeypatch.setattr(configurations, "why_not_triton", lambda: None)
    known = configurations.BLACKWELL
    checks = [each for each in samples.checks_with_sample("hopper") if each[0] in known]
    for arch in configurations.BLACKWELL_ARCHS:
        ops = {known[name].op for name, each in checks if each == arch}
        assert ops == {case.op for case in known.values()}
    assert [name for name, _ in checks] == list(known)


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["support", "--compile", *arguments])
    return result.exit_code, " ".join(re.sub(r"[│\s]+", " ", result.output).split())


@pytest.mark.slow
@pytest.mark.parametrize("part", samples.PARTS)
def test_the_command_compiles_a_sample(monkeypatch, part):
    asked = []
    monkeypatch.setattr(
        compilation, "run_with_progress", lambda checks, jobs, dump: asked.extend(checks) or []
    )
    assert invoke("--sample", part)[0] == 0
    assert asked == samples.checks_with_sample(part)


def test_what_is_no_part_is_refused():
    code, output = invoke("--sample", "half")
    assert code == 2
    assert "--sample must be hopper or portable, got 'half'" in output
