"""`mlakit bench` as it is typed, on a pretended GPU: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import json
import re
import signal
from dataclasses import replace
from threading import current_thread, main_thread
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from mlakit.tools import cli
from mlakit.tools.bench import (
    GPU_SUITES,
    ONLY_IF_NAMED,
    ceilings,
    charts,
    gpu_timers,
    suite,
)
from mlakit.tools.bench.measure import WallClock
from mlakit.tools.bench.report import INTERRUPTED, LeftOut
from tests.kernel_launchers import by_name, replace_launcher
from tests.tools.bench.fakes import CEILINGS, pretend_gpu, report, row

SHAPE = ("--shape", "3q2s70", "--heads", "2")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def gpu_of_a_kind(monkeypatch):
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(suite, "BUDGET_S", 0.05)
    monkeypatch.setattr(suite.Workload, "budget_s", 0.05)


def bench(*arguments: object):
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


def flat(output: str) -> str:
    """What was printed without the boxes and folds of a narrow terminal."""
    return re.sub(r"[│\s]+", " ", output)


@pytest.fixture
def stored(tmp_path):
    """A --json file: one workload faster than its peer, one slower."""
    file = tmp_path / "stored.json"
    rows = [
        row("decode-a", "mlakit", 100.0, roofline=0.9),
        row("decode-a", "flash_mla", 125.0, speedup=spread(1.25), min_speedup=1.18, met=True),
        row("decode-b", "mlakit", 50.0, roofline=0.4),
        row("decode-b", "flash_mla", 40.0, speedup=spread(0.8), min_speedup=1.18, met=False),
        row("decode-b", "slow <one>", 400.0, speedup=spread(8.0)),
    ]
    file.write_text(json.dumps(report(*rows).as_json()), encoding="utf-8")
    return file


def spread(value: float):
    return row("", "", value).us


@pytest.mark.slow
def test_a_shape_is_measured_next_to_its_peers(tmp_path):
    file = tmp_path / "figures.json"
    result = bench("decode", *SHAPE, "--json", file)
    assert result.exit_code == 0, result.output
    assert str(CEILINGS) in flat(result.output)
    assert "decode-bf16-b3-h2-q2-70: sdpa not timed, is wrong on request 0" in flat(result.output)
    assert "eager not timed, failed: no kernel" in result.output
    assert "flashinfer not timed, is not installed" in result.output
    assert "% roof" in result.output
    written = json.loads(file.read_text("utf-8"))
    implementations = [each["implementation"] for each in written["rows"]]
    assert implementations == ["mlakit", "planned in the call", "read same bytes", "flash_mla"]
    assert (written["mode"], written["ceilings"]["read_gb_s"]) == ("cold", 4000.0)
    assert {each["implementation"] for each in written["left_out"]} == {
        "sdpa",
        "eager",
        "flashinfer",
    }
    assert written["environment"]["peers"] == ["flash_mla: the wheel"]
    ours = written["rows"][0]
    roofline_us = max(ours["flops"] / 700e6, ours["bytes"] / 4e6)
    assert ours["roofline"] == pytest.approx(roofline_us / ours["p50_us"])


def ctrl_c() -> None:
    raise KeyboardInterrupt


def sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [ctrl_c, sigterm])
def test_an_interrupted_run_keeps_what_is_done(interrupt, tmp_path, monkeypatch):
    if current_thread() is not main_thread():
        pytest.skip("signals go to the main thread")
    file = tmp_path / "figures.json"
    time_interleaved, timed = suite.time_interleaved, []

    def interrupted(calls, **given):
        timed.append(calls)
        if len(timed) == 2:
            interrupt()
        return time_interleaved(calls, **given)

    monkeypatch.setattr(suite, "time_interleaved", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    result = bench("decode", "sparse-decode", "--quick", "--json", file)
    assert result.exit_code == 130, result.output
    assert len(timed) == 2  # and the second suite has not begun
    written = json.loads(file.read_text("utf-8"))
    (done,) = {each["workload"] for each in written["rows"]}
    left_out = {
        each["workload"]: each["reason"]
        for each in written["left_out"]
        if each["implementation"] == "mlakit"
    }
    assert done not in left_out
    assert set(left_out.values()) == {"the run was interrupted"}
    assert "mlakit not timed, the run was interrupted" in flat(result.output)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_stored_report_of_an_interrupted_run_is_no_error(tmp_path):
    file = tmp_path / "stored.json"
    left_out = [LeftOut("decode-b", "mlakit", INTERRUPTED)]
    partial = replace(report(row("decode-a", "mlakit", 100.0)), left_out=left_out)
    assert partial.is_interrupted
    file.write_text(json.dumps(partial.as_json()), encoding="utf-8")
    result = bench("--from", file)
    assert result.exit_code == 0, result.output
    assert "decode-b: mlakit not timed, the run was interrupted" in flat(result.output)


@pytest.mark.slow
def test_peers_can_be_left_out():
    output = bench("decode", *SHAPE, "--no-peers").output
    assert "flash_mla" not in output
    assert "mlakit" in output


# test_transformers_suite runs that one
@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in GPU_SUITES if each != "transformers"])
def test_every_suite_runs(name, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    file = tmp_path / "figures.csv"
    arguments = ("--only", "h16-1024") if name == "grid" else ()
    result = bench(name, "--quick", *arguments, "--csv", file)
    assert result.exit_code == 0, result.output
    with file.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert {each["implementation"] for each in rows} > {"mlakit"}
    assert {each["suite"] for each in rows} == {name}
    assert all(float(each["p50_us"]) > 0 for each in rows)
    assert {each["min_speedup"] for each in rows} == {""}  # tiny problems have no targets


def test_without_a_suite_all_for_the_gpu_run(monkeypatch):
    ran = []
    monkeypatch.setattr(suite, "run", lambda name, *_, **__: ran.append(name) or report(suite=name))
    assert bench("--peers").exit_code == 0
    assert ran == [name for name in GPU_SUITES if name not in ONLY_IF_NAMED]


@pytest.mark.slow
def test_a_wrong_kernel_ends_the_command_with_status_1(monkeypatch, tmp_path):
    scale_out = by_name(after=lambda a: a["out"].mul_(1.1))
    replace_launcher(monkeypatch, "mla_decode", scale_out, backend="cpu")
    file = tmp_path / "figures.csv"
    result = bench("decode", *SHAPE, "--csv", file)
    assert result.exit_code == 1
    assert "decode-bf16-b3-h2-q2-70 is wrong: out of request 0" in flat(result.output)
    assert not file.exists()


@pytest.mark.slow
def test_the_host_is_timed_next_to_replay_and_an_empty_kernel(tmp_path):
    file = tmp_path / "host.json"
    result = bench("decode", *SHAPE, "--host", "--json", file)
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text("utf-8"))
    assert written["mode"] == "host"
    assert [each["implementation"] for each in written["rows"]] == [
        *("mlakit", "mlakit, graph replay", "planned in the call", "flash_mla", "empty kernel"),
    ]
    assert {each["roofline"] for each in written["rows"]} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cold", "b2b", "graph"])
def test_the_mode_chooses_the_timer(mode, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(gpu_timers, "timer_for", lambda name: asked.append(name) or WallClock())
    file = tmp_path / "figures.json"
    assert bench("decode", *SHAPE, "--mode", mode, "--json", file).exit_code == 0
    assert asked == ["cold", mode]  # the ceilings have their own
    assert json.loads(file.read_text("utf-8"))["mode"] == mode


@pytest.mark.slow
def test_what_cannot_be_captured_is_left_out(monkeypatch):
    class Graphs(WallClock):
        def prepared(self, call):
            if call.__name__ == "right":  # the peer
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            return call

    monkeypatch.setattr(gpu_timers, "timer_for", lambda mode: Graphs())
    result = bench("decode", *SHAPE, "--mode", "graph")
    assert result.exit_code == 0
    said = "flash_mla not timed, cannot be captured: operation not permitted when stream is"
    assert said in flat(result.output)


@pytest.mark.slow
def test_a_workload_too_large_is_left_out(monkeypatch):
    from mlakit.tools.bench.decode import Decode

    def too_large(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 999 GiB.\nmore")

    monkeypatch.setattr(Decode, "build_case", too_large)
    result = bench("decode", *SHAPE)
    assert result.exit_code == 0
    assert "mlakit not timed, CUDA out of memory. Tried to allocate 999 GiB." in flat(result.output)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["mlakit", "flash_mla"])
def test_one_that_runs_out_of_memory_while_it_is_timed_is_left_out(
    implementation, monkeypatch, tmp_path
):
    class Small(WallClock):
        """Has memory for all but one."""

        def prepared(self, call):
            self.count = getattr(self, "count", -1) + 1
            return exhausted if names[self.count % len(names)] == implementation else call

    def exhausted():
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    names = ("mlakit", "planned in the call", "read same bytes", "flash_mla")
    monkeypatch.setattr(gpu_timers, "timer_for", lambda mode: Small())
    file = tmp_path / "figures.json"
    result = bench("decode", "branch", "--shape", "2q1s70", "--heads", "2", "--json", file)
    assert result.exit_code == 0, result.output
    assert f"decode-bf16-b2-h2-70: {implementation} not timed, CUDA out of memory." in flat(
        result.output
    )
    decode, branch = json.loads(file.read_text("utf-8"))
    others = [name for name in names if name != implementation]
    # without mlakit there is nothing to compare them with
    timed = [each["implementation"] for each in decode["rows"]]
    assert timed == ([] if implementation == "mlakit" else others)
    assert branch["suite"] == "branch"


@pytest.mark.slow
def test_ceilings_are_measured_once_for_all_suites(monkeypatch):
    measured = []

    def measure(timer, after_one):
        measured.append(timer)
        return CEILINGS

    monkeypatch.setattr(ceilings, "measure", measure)
    arguments = ("--shape", "2q1s70", "--heads", "2")
    assert bench("decode", "branch", *arguments).exit_code == 0
    assert len(measured) == 1


@pytest.mark.slow
def test_stored_figures_are_shown_again(stored):
    result = bench("--from", stored)
    assert result.exit_code == 0, result.output
    assert "decode (cold): mlakit bench decode --peers" in result.output
    assert re.search(r"flash_mla +125 .*1\.25x .*≥ 1\.18x", result.output)
    assert re.search(r"flash_mla +40 .*0\.80x .*below 1\.18x", result.output)
    assert "w: eager not timed, is too slow & old" in result.output


@pytest.mark.slow
def test_the_csv_has_the_keys_of_the_json(stored, tmp_path):
    file = tmp_path / "figures.csv"
    assert bench("--from", stored, "--csv", file).exit_code == 0
    first, *others = file.read_text("utf-8").splitlines()
    keys = json.loads(stored.read_text("utf-8"))["rows"][0]
    assert first.split(",") == ["suite", "mode", *keys]
    assert len(others) == 5
    assert others[0].startswith("decode,cold,decode-a,mla_decode,mlakit,30,99.0,100.0,101.0,")


@pytest.mark.slow
def test_charts_are_written_as_svg_and_png(stored, tmp_path):
    folder = tmp_path / "charts"
    assert bench("--from", stored, "--plot", folder).exit_code == 0
    kinds = ("bars", "roofline")
    names = {f"decode-cold-{kind}.{end}" for kind in kinds for end in ("svg", "png")}
    assert {each.name for each in folder.iterdir()} == names
    for kind in kinds:
        assert (folder / f"decode-cold-{kind}.png").read_bytes().startswith(PNG)
        drawn = ElementTree.fromstring((folder / f"decode-cold-{kind}.svg").read_text("utf-8"))
        texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
        assert "slow <one>" in texts
        assert "mlakit" in texts


@pytest.mark.slow
def test_plots_without_matplotlib_are_refused_before_the_run(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    result = bench("--from", stored, "--plot", tmp_path / "charts")
    assert result.exit_code == 2
    assert "--plot needs matplotlib, which is not installed: pip install" in flat(result.output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decode", "--from", "STORED"], "--from measures nothing, so SUITE has no effect"),
        (["--host", "--from", "STORED"], "--from measures nothing, so --host has no effect"),
        (["--mode", "cold", "--from", "STORED"], "so --mode has no effect"),
        (["--no-peers", "--from", "STORED"], "so --no-peers has no effect"),
        (["--threads", "2", "--from", "STORED"], "so --threads has no effect"),
        (["decode", "--platform", "x86_64"], "--platform needs --fetch-peers"),
        (["--from", "FOLDER/none.json"], "--from: FOLDER/none.json cannot be read, No such file"),
        (["--from", "FOLDER/text"], "--from: FOLDER/text is not JSON"),
        (["--from", "FOLDER/other.json"], "is no report of mlakit bench"),
        (["--from", "FOLDER/newer.json"], "has schema 9, this version reads 3"),
        (["--from", "STORED", "--compare", "FOLDER/text"], "--compare: FOLDER/text is not JSON"),
        (["--from", "STORED", "--csv", "FOLDER/no/file"], "--csv: there is no folder FOLDER/no"),
        (["--from", "STORED", "--plot", "FOLDER/no/file"], "--plot: there is no folder FOLDER/no"),
    ],
)
def test_files_that_will_not_do_are_named(stored, tmp_path, monkeypatch, arguments, said):
    monkeypatch.setenv("COLUMNS", "400")  # so that paths are not folded
    (tmp_path / "text").write_text("hello", "utf-8")
    (tmp_path / "other.json").write_text('{"a": 1}', "utf-8")
    (tmp_path / "newer.json").write_text('{"schema": 9, "rows": []}', "utf-8")

    def placed(text: str) -> str:
        return text.replace("STORED", str(stored)).replace("FOLDER", str(tmp_path))

    result = bench(*map(placed, arguments))
    assert result.exit_code == 2
    assert placed(said) in flat(result.output)


@pytest.fixture
def measured(monkeypatch):
    """The suites that ran: in the place of the work, which comes after all files were opened."""
    ran = []
    monkeypatch.setattr(suite, "run", lambda name, *_, **__: ran.append(name) or report(suite=name))
    return ran


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--json", "--csv", "--plot"])
def test_a_target_that_cannot_be_written_ends_the_command_before_the_work(
    option, measured, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "400")
    target = tmp_path / "target"
    target.write_text("") if option == "--plot" else target.mkdir()
    first = tmp_path / "first.json"
    result = bench("decode", *(("--json", first) if option != "--json" else ()), option, target)
    assert result.exit_code == 2
    reason = "File exists" if option == "--plot" else "Is a directory"
    assert f"{option}: {target} cannot be written, {reason}" in flat(result.output)
    assert measured == []
    assert not first.exists()  # it was made, and is gone again


def test_two_files_that_are_one_are_refused(measured, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    file = tmp_path / "figures"
    result = bench("decode", "--json", file, "--csv", tmp_path / "." / "figures")
    assert (result.exit_code, measured) == (2, [])
    assert "--json and --csv both name" in flat(result.output)


@pytest.mark.parametrize("fails", [False, True])
def test_targets_are_there_while_the_work_is_done(fails, tmp_path, monkeypatch):
    new, old, folder = tmp_path / "new.json", tmp_path / "old.csv", tmp_path / "charts"
    old.write_text("earlier figures", "utf-8")
    seen = []

    def run(name, *_, **__):
        seen.append((new.exists(), old.read_text("utf-8"), folder.is_dir()))
        return None if fails else report(suite=name)

    monkeypatch.setattr(suite, "run", run)
    result = bench("decode", "--json", new, "--csv", old, "--plot", folder)
    assert result.exit_code == int(fails)
    assert seen == [(True, "earlier figures", True)]
    assert (new.exists(), folder.exists()) == (not fails, not fails)
    assert (old.read_text("utf-8") == "earlier figures") == fails


def test_figures_that_are_written_stay_when_a_later_file_fails(measured, tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("no chart")

    monkeypatch.setattr(charts, "save_charts", broken)
    figures, folder = tmp_path / "figures.json", tmp_path / "charts"
    result = bench("decode", "--json", figures, "--plot", folder)
    assert isinstance(result.exception, RuntimeError)
    assert json.loads(figures.read_text("utf-8"))["suite"] == "decode"
    assert not folder.exists()


@pytest.mark.slow
def test_the_comparison_says_only_what_moved(stored, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # a narrow table folds its cells
    earlier = tmp_path / "earlier.json"
    rows = [
        row("decode-a", "mlakit", 100.5),
        row("decode-a", "flash_mla", 125.0, speedup=spread(1.125)),
        row("decode-b", "mlakit", 40.0),
        row("decode-c", "mlakit", 40.0),
    ]
    earlier.write_text(json.dumps(report(*rows).as_json()), "utf-8")
    result = bench("--from", stored, "--compare", earlier)
    assert result.exit_code == 0, result.output
    assert re.search(r"decode-a +mlakit, us +100 +100 +0\.995 +within the spread", result.output)
    assert re.search(
        r"speedup over flash_mla +1\.12 +1\.25 +1\.111 +better by 11\.1%", result.output
    )
    assert re.search(r"decode-b +mlakit, us +40 +50 +1\.250 +worse by 25\.0%", result.output)
    assert "3 figures: 1 better, 1 worse, 1 within the spread" in result.output
    assert "only before: decode-c" in result.output
