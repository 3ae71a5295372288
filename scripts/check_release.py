"""Checks what is about to be released: python scripts/check_release.py dist [--import]

The wheel and the source release in the folder have the files that they should have, and no others.
With `--import`, in an environment that has the wheel, the package is imported and decodes, with no
other package than torch.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ("mlakit/__init__.py", "mlakit/py.typed", "mlakit/kernels/hopper/support.py")
LEFT_OUT = ("mlakit/tools/emulator/", "tests/", "docs/", "scripts/", "examples/")
OF_SOURCES = ("tests/conftest.py", "docs/index.md", "Makefile", "LICENSE", ".ci/run")
BARE = """
import sys
for name in ("typer", "rich", "safetensors", "numpy", "transformers", "triton"):
    sys.modules[name] = None  # as where it is not installed
import mlakit, torch
assert "site-packages" in mlakit.__file__, mlakit.__file__
for name in mlakit.__all__:
    getattr(mlakit, name)
model = mlakit.MLAGeometry.preset("deepseek-v3").with_heads(2)
cache = mlakit.PagedLatentCache.allocate(model, "fp8_block128", num_pages=1, page_size=4)
cache.layer(0).write(torch.arange(4), torch.randn(4, 576))
out, lse = mlakit.mla_decode(
    torch.randn(1, 2, 576).bfloat16(), cache, torch.zeros(1, 1).int(), torch.tensor([4]).int(),
    softmax_scale=model.softmax_scale,
)
assert out.isfinite().all() and out.std() > 0
print(f"mlakit {mlakit.__version__} with torch {torch.__version__} alone")
"""


def version() -> str:
    text = (ROOT / "mlakit" / "_version.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.*)"$', text, flags=re.MULTILINE)[0]


def wheel_complaints(path: Path) -> Iterator[str]:
    """What is wrong with a wheel."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        metadata = next((name for name in names if name.endswith(".dist-info/METADATA")), None)
        text = "" if metadata is None else wheel.read(metadata).decode()
    yield from (f"{path.name} lacks {name}" for name in NEEDED if name not in names)
    yield from (f"{path.name} has {name}" for name in names if name.startswith(LEFT_OUT))
    if not any(name.endswith("/LICENSE") for name in names):
        yield f"{path.name} lacks LICENSE"
    if not re.search(rf"^Version: {re.escape(version())}$", text, flags=re.MULTILINE):
        yield f"{path.name} is not of version {version()}"
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if not target.startswith("https://"):
            yield f"{path.name}: the link to {target} leads nowhere on PyPI"


def source_complaints(path: Path) -> Iterator[str]:
    """What is wrong with a source release."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = (*NEEDED, "mlakit/tools/emulator/__init__.py", *OF_SOURCES)
    yield from (f"{path.name} lacks {name}" for name in needed if name not in names)


def complaints(folder: Path) -> Iterator[str]:
    """What is wrong with the one wheel and the one source release in a folder."""
    for pattern, check in (("*.whl", wheel_complaints), ("*.tar.gz", source_complaints)):
        found = sorted(folder.glob(pattern))
        if len(found) != 1:
            yield f"{folder} must have one {pattern}, it has {len(found)}"
        for path in found:
            yield from check(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--import", action="store_true", dest="imported")
    given = parser.parse_args()
    found = list(complaints(given.folder))
    print("\n".join(found) or f"{given.folder}: the wheel and the source release are whole")  # noqa: T201
    if given.imported:
        # not from the checkout, which the current folder would give
        done = subprocess.run([sys.executable, "-c", BARE], cwd=given.folder, check=False)
        found += ["the import failed"] * (done.returncode != 0)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
