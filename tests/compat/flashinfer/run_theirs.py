"""Runs a part of a test file of FlashInfer against the drop-in: `run_theirs.py FILE 3/40`.

Part 3/40 is the tests 3, 43, 83 and so on. Without a GPU the tensors of the tests are put on the
CPU, which passes for an H200, and large problems are left out.
"""

from __future__ import annotations

import sys
import tempfile
from math import prod
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mlakit.compat.flashinfer import install

ON_CPU = {
    'torch.device("cuda:0")': 'torch.device("cpu")',
    'torch.device("cuda")': 'torch.device("cpu")',
    'device="cuda:0"': 'device="cpu"',
    ".to(0)": "",
    "torch.cuda.synchronize()": "None",
}
# product of a test's numbers: lengths, heads, batch
LARGEST_ON_CPU = 2**21


class Part:
    """A plugin of pytest that keeps some of the tests."""

    def __init__(self, part: str) -> None:
        self.first, self.every = map(int, part.split("/"))

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        """Keep the tests of the part; on the CPU, those of them that are small."""
        items[:] = items[self.first :: self.every]
        if not torch.cuda.is_available():
            items[:] = [item for item in items if size_of(item) <= LARGEST_ON_CPU]


def size_of(item: pytest.Function) -> int:
    spec = getattr(item, "callspec", None)
    numbers = [each for each in spec.params.values() if type(each) is int] if spec else []
    return prod(max(each, 1) for each in numbers)


def add_helpers() -> None:
    """Add the helpers that the tests import from a package of tests."""
    names = ("tests", "tests.test_helpers", "tests.test_helpers.test_helpers")
    for name in names:
        sys.modules[name] = ModuleType(name)
    vars(sys.modules[names[-1]])["clear_cuda_cache"] = lambda device: None


def main(path: str, part: str, *options: str) -> int:
    install(force=True)
    add_helpers()
    source = Path(path).read_text(encoding="utf-8")
    if not torch.cuda.is_available():
        for theirs, ours in ON_CPU.items():
            source = source.replace(theirs, ours)
        vars(sys.modules["flashinfer.utils"])["is_sm90a_supported"] = lambda device: True
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / Path(path).name
        copy.write_text(source, encoding="utf-8")
        quiet = ("-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist")
        return int(pytest.main([*quiet, str(copy), *options], plugins=[Part(part)]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
