"""How peers of the benchmarks are fetched, kept, unpacked and loaded."""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mlakit.dispatch import knobs
from mlakit.tools import cli
from mlakit.tools.bench import peers
from mlakit.tools.bench.peers import fetch, fetched
from tests.tools.bench.peer_fakes import (
    DEEP_GEMM,
    FA3_OF_VLLM,
    FLASH_MLA,
    RECORDER,
    dense_decode,
    pretend_gpu,
)

with_gpu = pytest.fixture(pretend_gpu)


KEPT_OF_DEEP_GEMM = ("__init__.py", "_C.py", "include/deep_gemm/impls/gemm.cuh")
KEPT = {*fetch.WANTED.values(), *(Path("deep_gemm") / name for name in KEPT_OF_DEEP_GEMM)}


def make_wheel(path: Path, *, without: str = "") -> Path:
    contents = dict.fromkeys(fetch.WANTED, b"library " * 1000)
    contents["vllm/third_party/flashmla/flash_mla_interface.py"] = (
        b"import torch\nimport vllm._flashmla_C\n" + RECORDER.encode() + FLASH_MLA.encode()
    )
    contents["vllm/vllm_flash_attn/flash_attn_interface.py"] = (
        RECORDER.encode() + FA3_OF_VLLM.encode()
    )
    package = dict.fromkeys(KEPT_OF_DEEP_GEMM, b"header")
    package["__init__.py"] = b"from ._C import *\nfrom ._C import calls\n"
    package["_C.py"] = RECORDER.encode() + DEEP_GEMM.encode()
    contents |= {f"{fetch.PACKAGE}{name}": content for name, content in package.items()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            if name != without:
                archive.writestr(zipfile.ZipInfo(name), content)  # the same bytes at any time
        archive.writestr(zipfile.ZipInfo("vllm/version.py"), b"")
    return path


@pytest.fixture
def loaded(monkeypatch):
    """The libraries that torch loaded, with their contents."""
    found: list[tuple[str, bytes]] = []
    monkeypatch.setattr(
        torch.ops, "load_library", lambda path: found.append((path, Path(path).read_bytes()))
    )
    return found


@pytest.mark.slow
def test_what_is_fetched_is_used(with_gpu, loaded):
    target = knobs.peers_folder()
    kept = fetch.keep(make_wheel(with_gpu / "a.whl"), target)
    assert {path.relative_to(target) for path in kept} == {
        *fetch.WANTED.values(),
        fetched.DEEP_GEMM,
    }
    assert files_in(target) == KEPT
    assert peers.present() | {"flashinfer": "", "sdpa": ""} == {
        **dict.fromkeys(("flash_mla", "fa3", "deep_gemm", "eager")),
        "flashinfer": "",
        "sdpa": "",
    }
    libraries = [target / fetched.FLASH_MLA, target / fetched.FA3]
    assert loaded == [(str(path), b"library " * 1000) for path in libraries]
    for name in ("flash_mla", "fa3", "deep_gemm"):
        assert peers.origins()[name] == f"fetched, {fetched.WHEEL}"
    problem = dense_decode()
    ready, _ = peers.baselines(problem)
    assert [each.name for each in ready] == ["flash_mla", "fa3", "eager"]
    assert torch.equal(ready[1].call(), problem.q[..., :512])
    assert len(loaded) == 2


def test_a_folder_that_is_read_only_is_unpacked_elsewhere(tmp_path, loaded, monkeypatch):
    packed = tmp_path / fetched.FA3_PACKED.name
    packed.write_bytes(lzma.compress(b"library"))
    unpack = fetched.unpack

    def refuse_here(packed: Path, library: Path) -> None:
        if library.parent == tmp_path:
            raise PermissionError(library)
        unpack(packed, library)

    monkeypatch.setattr(fetched, "unpack", refuse_here)
    fetched.load_packed_library(packed, tmp_path / fetched.FA3.name)
    ((path, content),) = loaded
    assert content == b"library"
    assert not Path(path).exists()
    assert list(tmp_path.iterdir()) == [packed]


def test_a_library_fetched_anew_takes_the_place_of_the_unpacked_one(tmp_path, loaded):
    packed, library = tmp_path / fetched.FA3_PACKED.name, tmp_path / fetched.FA3.name
    library.write_bytes(b"old")
    packed.write_bytes(lzma.compress(b"new"))
    os.utime(library, ns=(0, packed.stat().st_mtime_ns - 1))
    fetched.load_packed_library(packed, library)
    assert loaded == [(str(library), b"new")]
    library.write_bytes(b"unpacked since")
    fetched.load_packed_library.cache_clear()
    fetched.load_packed_library(packed, library)
    assert loaded[1:] == [(str(library), b"unpacked since")]


@pytest.mark.parametrize("damage", [b"not packed at all", lzma.compress(b"library" * 99)[:-20]])
def test_a_damaged_library_says_so(with_gpu, loaded, damage):
    fetch.keep(make_wheel(with_gpu / "a.whl"), knobs.peers_folder())
    (knobs.peers_folder() / fetched.FA3_PACKED).write_bytes(damage)
    assert "_vllm_fa3_C.abi3.so.xz is damaged: fetch the peers again" in peers.present()["fa3"]
    assert not list((knobs.peers_folder() / "fa3").glob("*.so*[0-9]"))


def test_a_library_that_does_not_load_says_so(with_gpu, monkeypatch):
    fetch.keep(make_wheel(with_gpu / "a.whl"), knobs.peers_folder())

    def refuse(path: str) -> None:
        raise OSError(f"{path}: wrong ELF class")

    monkeypatch.setattr(torch.ops, "load_library", refuse)
    for name in ("flash_mla", "fa3"):
        assert peers.present()[name].endswith(": wrong ELF class")


@pytest.mark.usefixtures("loaded")
def test_a_package_that_does_not_load_says_so_and_leaves_no_module(with_gpu):
    fetch.keep(make_wheel(with_gpu / "a.whl"), knobs.peers_folder())
    (knobs.peers_folder() / "deep_gemm/_C.py").unlink()
    assert "No module named 'mlakit_peers_deep_gemm._C'" in peers.present()["deep_gemm"]
    assert not [name for name in sys.modules if name == "mlakit_peers_deep_gemm"]


@pytest.mark.parametrize("missing", ["vllm/_flashmla_C.abi3.so", f"{fetch.PACKAGE}__init__.py"])
def test_a_wheel_of_another_shape_is_an_error(tmp_path, missing):
    with pytest.raises(fetch.FetchError, match=rf"a.whl has no {missing}"):
        fetch.keep(make_wheel(tmp_path / "a.whl", without=missing), tmp_path / "peers")


@pytest.mark.parametrize("outside", ["../../escaped.py", "a/../../escaped.py", "ABSOLUTE"])
def test_a_wheel_with_a_file_outside_of_its_folder_is_not_unpacked(tmp_path, outside):
    name = fetch.PACKAGE + outside.replace("ABSOLUTE", str(tmp_path / "escaped.py"))
    wheel = make_wheel(tmp_path / "a.whl")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(name, "raise SystemExit")
    target = tmp_path / "deep" / "peers"
    message = f"a.whl has a file outside of its folder, {name}: nothing was unpacked"
    with pytest.raises(fetch.FetchError, match=re.escape(message)):
        fetch.keep(wheel, target)
    assert not list(tmp_path.rglob("*.py"))
    assert not target.exists()


def test_platforms():
    assert fetch.platform_tags(None) == []
    assert fetch.platform_tags("manylinux_2_17_x86_64") == ["manylinux_2_17_x86_64"]
    assert fetch.platform_tags("x86_64")[0] == "manylinux_2_28_x86_64"


WHEEL = "vllm-0.26.0-cp38-abi3-manylinux_2_28_x86_64.whl"


class FakePip:
    """Stands for subprocess.run: notes the command, and leaves a wheel where pip would."""

    def __init__(self, *, offline: bool = False, name: str = WHEEL) -> None:
        self.offline = offline
        self.name = name
        self.command: list[str] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.command = command
        if self.offline:
            said = "WARNING: Retrying\nERROR: No matching distribution found for vllm"
            return subprocess.CompletedProcess(command, 1, stderr=said)
        make_wheel(Path(command[command.index("-d") + 1]) / self.name)
        return subprocess.CompletedProcess(command, 0, stderr="")


@pytest.fixture
def pinned(monkeypatch, tmp_path):
    """The wheel of `FakePip` is the one that was released."""
    made = make_wheel(tmp_path / "released.whl")
    monkeypatch.setitem(fetch.SHA256, WHEEL, hashlib.sha256(made.read_bytes()).hexdigest())
    made.unlink()


def fetch_peers(*arguments: object):
    return CliRunner().invoke(cli.app, ["bench", "--fetch-peers", *map(str, arguments)])


def files_in(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.usefixtures("pinned")
def test_fetch_peers_downloads_and_keeps(tmp_path, monkeypatch):
    pip = FakePip()
    monkeypatch.setattr(fetch.subprocess, "run", pip)
    target = tmp_path / "kept"
    result = fetch_peers(target, "--platform", "aarch64")
    assert result.exit_code == 0, result.output
    assert pip.command[1:4] == ["-m", "pip", "download"]
    assert "manylinux_2_28_aarch64" in pip.command
    assert pip.command[-1] == "vllm==0.26.0"
    assert files_in(target) == KEPT  # the wheel itself is gone
    assert f"{target / fetched.FLASH_MLA}  8,000 bytes" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (WHEEL, f"it must be {fetch.SHA256[WHEEL]}"),
        ("vllm-0.26.0-cp38-abi3-linux_x86_64.whl", f"only {WHEEL}, "),
    ],
)
def test_a_wheel_that_was_not_released_is_not_unpacked(tmp_path, monkeypatch, name, said):
    monkeypatch.setattr(fetch.subprocess, "run", FakePip(name=name))
    target = tmp_path / "kept"
    result = fetch_peers(target)
    assert result.exit_code == 1
    assert f"Error: {name} has the SHA-256 " in result.output
    assert said in result.output
    assert "nothing was unpacked; --unpinned accepts it" in result.output
    assert files_in(target) == set()
    assert fetch_peers(target, "--unpinned").exit_code == 0
    assert files_in(target) == KEPT


def test_every_pinned_wheel_is_of_the_release_that_is_fetched():
    version = fetched.WHEEL.replace("==", "-")
    assert all(name.startswith(f"{version}-") for name in fetch.SHA256)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in fetch.SHA256.values())
    machines = {name.removesuffix(".whl").partition("2_28_")[2] for name in fetch.SHA256}
    assert machines == {"x86_64", "aarch64"}


@pytest.mark.slow
@pytest.mark.usefixtures("pinned")
def test_fetched_peers_lie_in_the_cache_folder_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.subprocess, "run", FakePip())
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for variable, value, found in (
        ("XDG_CACHE_HOME", "", "home/.cache/mlakit/peers"),
        ("XDG_CACHE_HOME", "relative", "home/.cache/mlakit/peers"),
        ("XDG_CACHE_HOME", str(tmp_path / "caches"), "caches/mlakit/peers"),
        ("MLAKIT_PEERS", str(tmp_path / "elsewhere"), "elsewhere"),
        ("MLAKIT_PEERS", "~/mine", "home/mine"),
    ):
        monkeypatch.setenv(variable, value)
        assert fetch_peers().exit_code == 0
        assert (tmp_path / found / fetched.FLASH_MLA).is_file()
        assert knobs.peers_folder() == tmp_path / found
    assert list(here.iterdir()) == []
    monkeypatch.setenv("MLAKIT_PEERS", "peers")
    result = fetch_peers()
    assert result.exit_code == 2
    said = " ".join(re.sub("[│\\s]+", " ", result.output).split())
    assert "MLAKIT_PEERS must name a folder by an absolute path, got 'peers'" in said


def test_a_folder_of_peers_where_a_command_is_run_is_not_loaded(with_gpu, loaded, monkeypatch):
    fetch.keep(make_wheel(with_gpu / "a.whl"), with_gpu / ".peers")
    monkeypatch.chdir(with_gpu)
    monkeypatch.setenv("XDG_CACHE_HOME", str(with_gpu / "caches"))
    with knobs.override(peers=knobs.peers.default):
        assert f"it is not in {with_gpu}/caches/mlakit/peers" in peers.present()["flash_mla"]
    assert loaded == []


@pytest.mark.slow
def test_fetch_peers_explains_what_went_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch.subprocess, "run", FakePip(offline=True))
    result = fetch_peers()
    assert result.exit_code == 1
    assert "Error: pip could not download vllm==0.26.0. Without a network, fetch" in result.output
    assert "No matching distribution found for vllm" in result.output
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    result = fetch_peers()
    assert (result.exit_code, "needs pip" in result.output) == (1, True)
    result = fetch_peers("a", "b")
    assert (result.exit_code, "takes one folder, got a b" in result.output) == (2, True)


def test_fetch_peers_into_a_place_that_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.subprocess, "run", FakePip())
    (tmp_path / "file").write_text("")
    result = fetch_peers(tmp_path / "file")
    assert result.exit_code == 1
    assert "cannot write to" in result.output
