"""`mlakit bench --fetch-peers`: FlashMLA, FlashAttention-3 and DeepGEMM from a released wheel.

The vllm 0.26.0 wheel is the newest one for torch 2.11 and CUDA 13. It contains FlashMLA and
FlashAttention-3 as shared objects that register torch ops, and DeepGEMM 2.5.0 as a package. Only
these and their thin wrappers are kept, 45 MB of 300 MB, most of it headers that DeepGEMM compiles;
vLLM itself does not run. The files will be executed, so a wheel is unpacked only if its SHA-256 is
that of the release. Its FlashMLA is built without upstream's --register-usage-level=10 and is 5 to
14 % slower on an H200 than a build of upstream's source.
"""

from __future__ import annotations

import hashlib
import importlib.util
import lzma
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from mlakit.tools.bench.peers import fetched

PYTHON = "3.12"  # the libraries use the stable ABI: Python 3.8 and newer load them
GLIBC = (28, 31, 34, 35)  # of manylinux tags: pip takes one tag per option
CHUNK = 1 << 20
# by wheel of fetched.WHEEL, from PyPI's index
SHA256 = {
    "vllm-0.26.0-cp38-abi3-manylinux_2_28_x86_64.whl": (
        "adb1e4c9b46d0dfdb094121ae5aad670a42412dd813ed4e5db069ed6a15006de"
    ),
    "vllm-0.26.0-cp38-abi3-manylinux_2_28_aarch64.whl": (
        "52a4c3e55c2c80cc8793e52ccc244457ceade25b0ad7caa1c15e5002a95a1b2c"
    ),
}

WANTED = {
    "vllm/_flashmla_C.abi3.so": fetched.FLASH_MLA,
    "vllm/third_party/flashmla/flash_mla_interface.py": fetched.FLASH_MLA_WRAPPER,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": fetched.FA3_PACKED,
    "vllm/vllm_flash_attn/flash_attn_interface.py": fetched.FA3_WRAPPER,
}
PACKAGE = "vllm/third_party/deep_gemm/"  # kept whole; its library is in it once per Python version
# the wrapper imports its library from vLLM, which is not installed
IMPORT = b"import vllm._flashmla_C\n"
LOAD = (
    b"from pathlib import Path as _Path\n"
    b'torch.ops.load_library(str(_Path(__file__).with_name("_flashmla_C.abi3.so")))\n'
)


class FetchError(Exception):
    """The peers could not be fetched; the message says why and what to do."""


def fetch(target: Path, platform: str | None = None, *, unpinned: bool = False) -> list[Path]:
    """Download the wheel, check it, and copy the wanted files to `target`.

    platform  an architecture (x86_64, aarch64) or a wheel's platform tag; None: this machine's
    unpinned  accept a wheel that is not in `SHA256`
    """
    if importlib.util.find_spec("pip") is None:
        raise FetchError("fetching peers needs pip, and this Python has none: python -m ensurepip")
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix="wheel-") as scratch:
            wheel = _download(Path(scratch), platform)
            if not unpinned:
                check_hash(wheel)
            return keep(wheel, target)
    except OSError as error:
        raise FetchError(f"cannot write to {target}: {error}") from error


def platform_tags(platform: str | None) -> list[str]:
    """The --platform tags for pip: none for this machine."""
    if platform is None:
        return []
    is_tag = platform.startswith(("manylinux", "linux"))
    return [platform] if is_tag else [f"manylinux_2_{minor}_{platform}" for minor in GLIBC]


def _download(scratch: Path, platform: str | None) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON]
    for tag in platform_tags(platform):
        options += ["--platform", tag]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(scratch), fetched.WHEEL]
    # stdout is not captured: pip draws its progress bar there
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        message = "\n".join(done.stderr.strip().splitlines()[-4:])
        raise FetchError(
            f"pip could not download {fetched.WHEEL}. Without a network, fetch where there is one "
            f"and copy the folder here. The error of pip:\n{message}"
        )
    return wheels[0]


def check_hash(wheel: Path) -> None:
    """Raise FetchError unless the wheel is the released one."""
    digest = hashlib.sha256()
    with wheel.open("rb") as content:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    found, expected = digest.hexdigest(), SHA256.get(wheel.name)
    if found == expected:
        return
    known = f"it must be {expected}" if expected else f"only {', '.join(SHA256)} are known"
    raise FetchError(
        f"{wheel.name} has the SHA-256 {found}, and {known}. Its code would be executed, so "
        f"nothing was unpacked; --unpinned accepts it"
    )


def keep(wheel: Path, target: Path) -> list[Path]:
    """Copy the wanted files of a wheel to `target`; returns the paths of those in `WANTED`, and of
    DeepGEMM's `__init__.py`."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    kept = []
    with (
        zipfile.ZipFile(wheel) as archive,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        names = set(archive.namelist())
        for source in (*WANTED, f"{PACKAGE}{fetched.DEEP_GEMM.name}"):
            if source not in names:
                raise FetchError(f"{wheel.name} has no {source}: this release cannot be used")
        package = _package_files(archive, target, wheel.name)
        for source, destination in WANTED.items():
            size = archive.getinfo(source).file_size
            task = progress.add_task(destination.name, total=size)
            out = target / destination
            out.parent.mkdir(parents=True, exist_ok=True)
            for done in _copied(archive, source, out):
                progress.advance(task, done)
            kept.append(out)
        task = progress.add_task(
            "deep_gemm", total=sum(archive.getinfo(name).file_size for name in package)
        )
        for name, out in package.items():
            out.parent.mkdir(parents=True, exist_ok=True)
            for done in _copied(archive, name, out):
                progress.advance(task, done)
        kept.append(target / fetched.DEEP_GEMM)
    return kept


def _package_files(archive: zipfile.ZipFile, target: Path, wheel: str) -> dict[str, Path]:
    """Where each file of DeepGEMM goes, by its name in the wheel.

    Raises FetchError for a name that leads out of the folder, with `..` or as an absolute path.
    """
    folder = target / fetched.DEEP_GEMM.parent
    files = {}
    for name in archive.namelist():
        if name.startswith(PACKAGE) and name[-1] != "/":
            out = folder / name.removeprefix(PACKAGE)
            if not out.resolve().is_relative_to(folder.resolve()):
                raise FetchError(
                    f"{wheel} has a file outside of its folder, {name}: nothing was unpacked"
                )
            files[name] = out
    return files


def _copied(archive: zipfile.ZipFile, source: str, out: Path) -> Iterator[int]:
    """Copy one file, compressed if its new name ends in .xz; yields the bytes of each step."""
    if out.suffix == ".py":
        out.write_bytes(archive.read(source).replace(IMPORT, LOAD))
        return
    with (
        archive.open(source) as unpacked,
        lzma.open(out, "wb") if out.suffix == ".xz" else out.open("wb") as target,
    ):
        while chunk := unpacked.read(CHUNK):
            target.write(chunk)
            yield len(chunk)
