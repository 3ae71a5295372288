"""The folder for the Hub computes where mlakit and the packages that it left out are absent."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from tests.paths import ROOT

_SPEC = importlib.util.spec_from_file_location("hub", ROOT / "scripts" / "hub.py")
hub = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(hub)

# what `kernels.get_local_kernel` does with a variant, without its checks
LOAD = """
import importlib.util, json, sys
from pathlib import Path

ABSENT = ("mlakit", "safetensors", "typer", "rich", "transformers")

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{name} is absent here")

sys.meta_path.insert(0, Absent())
variant = Path(sys.argv[1])
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
kernel = importlib.util.module_from_spec(spec)
sys.modules[name] = kernel
spec.loader.exec_module(kernel)
"""
DECODE = """
import torch

torch.manual_seed(0)
model = kernel.MLAGeometry.preset("deepseek-v3").with_heads(4)
cache = kernel.PagedLatentCache.allocate(model, "bf16", num_pages=4, page_size=4)
rows = torch.randn(16, 576).bfloat16()
cache.layer(0).write(torch.arange(16), rows)
cache.layer(0).payload.view(4, 4, 576)[0] = torch.nan  # a page of no request
pages, lens = [[3, 1], [2, 99]], [7, 2]
q = torch.randn(2, 4, 576).bfloat16()
out, lse = kernel.mla_decode(
    q, cache, torch.tensor(pages).int(), torch.tensor(lens).int(), softmax_scale=0.05
)
for i, (table, count) in enumerate(zip(pages, lens)):
    kept = rows.view(4, 4, 576)[table[: -(-count // 4)]].flatten(0, 1)[:count].double()
    scores = q[i].double() @ kept.T * 0.05
    assert (lse[i] - scores.logsumexp(-1)).abs().max() < 1e-4
    assert (out[i] - scores.softmax(-1) @ kept[:, :512]).abs().max() < 0.02
assert out.std() > 0.1
assert hasattr(getattr(torch.ops, name), "mla_decode")
assert not hasattr(torch.ops.mlakit, "mla_decode")
assert not any(each.split(".")[0] in ABSENT for each in sys.modules)
for public in kernel.__all__:
    getattr(kernel, public)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "mlakit"
    return folder, hub.build(folder)


@pytest.mark.slow
def test_it_computes_where_mlakit_is_not_installed(built, tmp_path):
    folder, variants = built
    assert [each.relative_to(folder).as_posix() for each in variants] == [
        "build/torch-cpu", "build/torch-cuda", "build/torch-rocm",
    ]  # fmt: skip
    command = [sys.executable, "-c", LOAD + DECODE, str(variants[0])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_nothing_in_it_imports_mlakit_by_name(built):
    _, (variant, *others) = built
    files = sorted(variant.rglob("*.py"))
    assert len(files) > 100
    for file in files:
        imported = [
            (getattr(node, "module", None), [each.name for each in node.names], node.level)
            if isinstance(node, ast.ImportFrom)
            else (None, [each.name for each in node.names], 0)
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        for module, names, level in imported:
            known = [module or ""] if level == 0 and module else names if level == 0 else []
            assert not any(each.split(".")[0] == "mlakit" for each in known), file
    paths = {file.relative_to(variant) for file in files}
    assert not any(Path(left) in {path, *path.parents} for left in hub.LEFT_OUT for path in paths)
    for other in others:
        for file in files:
            assert (other / file.relative_to(variant)).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_the_metadata_and_the_card(built):
    folder, variants = built
    ids = set()
    for variant in variants:
        metadata = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
        ids.add(metadata["id"])
        assert metadata["id"].isidentifier()
        assert metadata["backend"] == {"type": variant.name.removeprefix("torch-")}
        assert metadata["python-depends"] == []
    assert len(ids) == len(variants)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: kernels\n")
    assert "`DeepseekV3Attention`" in card
    with pytest.raises(ValueError, match="must be empty or new"):
        hub.build(folder)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("a.py", "from mlakit import x", "from . import x"),
        ("a.py", "from mlakit.b.c import x", "from .b.c import x"),
        ("a/__init__.py", "from mlakit.b import x", "from ..b import x"),
        ("a/b/c.py", "if x:\n    from mlakit import y", "if x:\n    from ... import y"),
        ("a/b.py", "'''\nfrom mlakit import y\n'''", "'''\nfrom mlakit import y\n'''"),
        ("a.py", "from mlakit_tools import x", "from mlakit_tools import x"),
    ],
)
def test_imports_become_relative(path, source, expected):
    assert hub.relative(source, PurePosixPath(path)) == expected


def test_an_import_that_has_no_relative_form_is_refused():
    with pytest.raises(ValueError, match="write `from mlakit import`, not `import`"):
        hub.relative("import mlakit.ops", PurePosixPath("a.py"))
