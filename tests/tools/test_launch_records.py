"""Records of random launches: what a run adds to a file, and the committed file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import figures
import pytest
from typer.testing import CliRunner

from mlakit.tools import check, cli, launch_records
from mlakit.tools.launch_records import EMULATOR, LaunchRecord, merged, read, write
from tests.kernel_launchers import by_name, replace_launcher

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs" / "data" / "random-launches.json"
RECORD = LaunchRecord(
    "mla_decode", "hopper", "m64_bf16", (3,), 100, 0, "5f1c2aa", "3.6.0", "NVIDIA H200"
)
ON_CPU = ("--op", "mla_decode", "--device", "cpu", "--backend", "cpu")


def invoke(*arguments: str) -> int:
    return CliRunner().invoke(cli.app, ["check", *arguments]).exit_code


def test_the_committed_record_can_be_read_and_is_written_alike(tmp_path):
    records = read(COMMITTED)
    assert sum(each.launches for each in records) > 100_000
    assert merged(records) == records  # a record for each kernel, commit, Triton and device
    write(tmp_path / "copy.json", records)
    assert (tmp_path / "copy.json").read_text() == COMMITTED.read_text()
    for each in records:
        assert each.seeds
        assert each.wrong <= each.launches
        assert each.wrong == 0 or each.note


def test_the_table_keeps_kernels_versions_and_the_emulator_apart(tmp_path, monkeypatch):
    newer = replace(RECORD, triton="3.9.0", launches=7, wrong=1, note="why")
    emulated = replace(newer, device=EMULATOR, launches=35, wrong=0)
    write(tmp_path / "random-launches.json", [RECORD, newer, emulated])
    monkeypatch.setattr(figures, "DATA", tmp_path)
    header, _, line = figures.launches().splitlines()
    columns = "| with Triton 3.6.0 | with Triton 3.9.0 | wrong | in the emulator |"
    assert header == f"| op | kernel {columns}"
    assert line == "| `mla_decode` | `hopper:m64_bf16` | 100 | 7 | 1 | 35 |"


def test_records_of_one_kernel_are_added_up():
    again = replace(RECORD, seeds=(3, 4), launches=20, wrong=1)
    assert merged([RECORD, again]) == [replace(RECORD, seeds=(3, 4), launches=120, wrong=1)]


@pytest.mark.parametrize("name", launch_records.KEY)
def test_other_kernels_commits_versions_and_devices_stay_apart(name):
    other = replace(RECORD, **{name: EMULATOR})
    assert merged([RECORD, other]) == [RECORD, other]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"launches": -1}, "launches must be a count, got -1"),
        ({"wrong": "0"}, "wrong must be a count, got '0'"),
        ({"seeds": [0.5]}, r"seeds must be a list of integers, got \[0.5\]"),
        ({"triton": None}, "triton must be a text, got None"),
        ({"more": 1}, r"different: \['more'\]"),
    ],
)
def test_other_contents_are_refused_by_name(tmp_path, change, words):
    path = tmp_path / "record.json"
    path.write_text(json.dumps([{**asdict(RECORD), **change}]))
    with pytest.raises(ValueError, match=f"record.json must hold records of launches: .*{words}"):
        read(path)
    assert invoke(*ON_CPU, "--launches", "1", "--record", str(path)) == 2


@pytest.mark.slow
def test_a_run_adds_its_launches_by_kernel(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    for first in ("0", "2"):
        arguments = ("--launches", "2", "--seed", "4", "--first", first, "--record", str(path))
        assert invoke(*ON_CPU, *arguments) == 0
    (record,) = read(path)
    assert (record.op, record.backend, record.kernel) == ("mla_decode", "cpu", "")
    assert (record.seeds, record.launches, record.wrong, record.device) == ((4,), 4, 0, "cpu")
    replace_launcher(
        monkeypatch, "mla_decode", by_name(after=lambda a: a["out"].fill_(7.0)), backend="cpu"
    )
    assert invoke(*ON_CPU, "--launches", "3", "--seed", "4", "--record", str(path)) == 1
    (record,) = read(path)
    assert (record.launches, record.wrong) == (5, 1)


def test_kernels_of_processes_are_counted_together():
    settings = check.Settings(("mla_decode",), 7, "cpu", "hopper", launches=2, record="file")
    kernel = ("mla_decode", "hopper", "m64_bf16")
    parts = [check.Outcome(settings, kernels={kernel: count}) for count in (3, 4)]
    joined = check._joined(settings, parts, 1.0)
    (record,) = launch_records.of_run(joined)
    assert (record.kernel, record.launches, record.seeds) == ("m64_bf16", 7, (7,))
