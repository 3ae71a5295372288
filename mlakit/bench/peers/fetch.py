"""`mlakit bench --fetch-peers`: two rival libraries out of a released wheel.

The vllm 0.26.0 wheel is the newest one built for torch 2.11 and CUDA 13. It carries FlashMLA and
FlashAttention-3 as shared objects that register torch ops; those and their thin wrappers are kept,
10 MB of 300, and nothing of vLLM runs. What is kept will be executed: a wheel is unpacked only if
it is, byte for byte, the one that was released. Its FlashMLA is built without upstream's
--register-usage-level=10, and is 5 to 14 % slower on an H200 than a build of upstream's source.
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

from mlakit.bench.peers import folder

PYTHON = "3.12"  # the libraries use the stable interface: any version from 3.8 on loads them
GLIBC = (28, 31, 34, 35)  # of manylinux tags: pip takes each tag by itself
CHUNK = 1 << 20
# by wheel of folder.WHEEL, as PyPI's index lists them
SHA256 = {
    "vllm-0.26.0-cp38-abi3-manylinux_2_28_x86_64.whl": (
        "adb1e4c9b46d0dfdb094121ae5aad670a42412dd813ed4e5db069ed6a15006de"
    ),
    "vllm-0.26.0-cp38-abi3-manylinux_2_28_aarch64.whl": (
        "52a4c3e55c2c80cc8793e52ccc244457ceade25b0ad7caa1c15e5002a95a1b2c"
    ),
}

WANTED = {
    "vllm/_flashmla_C.abi3.so": folder.FLASH_MLA,
    "vllm/third_party/flashmla/flash_mla_interface.py": folder.FLASH_MLA_WRAPPER,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": folder.FA3_PACKED,
    "vllm/vllm_flash_attn/flash_attn_interface.py": folder.FA3_WRAPPER,
}
# the wrapper imports its library as a part of vLLM, which is not there
IMPORT = b"import vllm._flashmla_C\n"
LOAD = (
    b"from pathlib import Path as _Path\n"
    b'torch.ops.load_library(str(_Path(__file__).with_name("_flashmla_C.abi3.so")))\n'
)


class FetchError(Exception):
    """The peers could not be fetched; the message says why and what to do."""


def fetch(target: Path, platform: str | None = None, *, unpinned: bool = False) -> list[Path]:
    """Download the wheel, check it, and keep what is wanted of it in `target`.

    platform  an architecture (x86_64, aarch64) or a wheel's platform tag; None: this machine's
    unpinned  take a wheel that `SHA256` does not know
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
    """What pip is told of the platform: nothing for this machine's own."""
    if platform is None:
        return []
    is_tag = platform.startswith(("manylinux", "linux"))
    return [platform] if is_tag else [f"manylinux_2_{minor}_{platform}" for minor in GLIBC]


def _download(scratch: Path, platform: str | None) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON]
    for tag in platform_tags(platform):
        options += ["--platform", tag]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(scratch), folder.WHEEL]
    # pip draws its progress bar on stdout, which therefore stays what it is
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = "\n".join(done.stderr.strip().splitlines()[-4:])
        raise FetchError(
            f"pip could not download {folder.WHEEL}. Without a network, fetch where there is one "
            f"and copy the folder here. pip said:\n{said}"
        )
    return wheels[0]


def check_hash(wheel: Path) -> None:
    """FetchError unless the wheel is the one that was released."""
    digest = hashlib.sha256()
    with wheel.open("rb") as content:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    found, expected = digest.hexdigest(), SHA256.get(wheel.name)
    if found == expected:
        return
    known = f"it must be {expected}" if expected else f"only {', '.join(SHA256)} are known"
    raise FetchError(
        f"{wheel.name} has the SHA-256 {found}, and {known}. It would be executed, so nothing was "
        f"unpacked; --unpinned takes it nevertheless"
    )


def keep(wheel: Path, target: Path) -> list[Path]:
    """Copy the wanted files of a wheel into `target`; returns where they are."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    kept = []
    with (
        zipfile.ZipFile(wheel) as archive,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        names = set(archive.namelist())
        for source, destination in WANTED.items():
            if source not in names:
                raise FetchError(f"{wheel.name} has no {source}: this release cannot be used")
            size = archive.getinfo(source).file_size
            task = progress.add_task(destination.name, total=size)
            out = target / destination
            out.parent.mkdir(parents=True, exist_ok=True)
            for done in _copied(archive, source, out):
                progress.advance(task, done)
            kept.append(out)
    return kept


def _copied(archive: zipfile.ZipFile, source: str, out: Path) -> Iterator[int]:
    """Copy one file, packing it if its new name says so; yields how many bytes each step read."""
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
