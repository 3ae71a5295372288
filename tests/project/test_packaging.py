"""What is released: its metadata, its sources, its page on PyPI, and the machines that test it."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from tests.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it where the standard library has none
    import tomli as tomllib

PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
HOME = "https://github.com/mlakit/mlakit"


def test_the_project_says_where_it_is():
    urls = PYPROJECT["project"]["urls"]
    assert urls["Homepage"] == HOME
    assert {"Documentation", "Changelog", "Issues"} <= set(urls)
    for address in urls.values():
        assert address.startswith(HOME)
        file = address.partition("/blob/main/")[2]
        assert not file or (ROOT / file).is_file(), address


def readme_for_pypi() -> str:
    """As the build makes it: hatch-fancy-pypi-readme applies these substitutions with `re.sub`."""
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = "".join((ROOT / part["path"]).read_text(encoding="utf-8") for part in hook["fragments"])
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text


def test_links_are_absolute_on_pypi():
    assert "readme" in PYPROJECT["project"]["dynamic"]
    assert any("hatch-fancy-pypi-readme" in each for each in PYPROJECT["build-system"]["requires"])
    targets = re.findall(r"\]\(([^)]+)\)", readme_for_pypi())
    assert len(targets) > 10
    for target in targets:
        assert target.startswith("https://")
        file = target.partition(f"{HOME}/blob/main/")[2].partition("#")[0]
        assert not file or (ROOT / file).is_file(), target
    assert f"[LICENSE]({HOME}/blob/main/LICENSE)" in readme_for_pypi()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a release has no list of what is in git")
def test_the_source_release_has_every_file_that_is_in_git():
    included = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    command = ["git", "-C", str(ROOT), "ls-files"]
    tracked = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    # pyproject.toml is always in it
    missing = [
        file
        for file in tracked
        if f"/{file.partition('/')[0]}" not in included and file != "pyproject.toml"
    ]
    assert missing == []
    assert {file for file in included if not (ROOT / file[1:]).exists()} == set()


def test_the_oldest_torch_is_the_oldest_that_is_allowed():
    (allowed,) = (
        line for line in PYPROJECT["project"]["dependencies"] if re.match("torch[^a-z]", line)
    )
    (version,) = re.findall(r"^OLDEST_TORCH := torch==([\d.]+)$", MAKEFILE, flags=re.MULTILINE)
    assert allowed == f"torch>={version.removesuffix('.0')}"


# what a user does without numpy, which torch does not require
WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import mlakit
import torch
from typer.testing import CliRunner
from mlakit.tools import cli
mlakit.quantize_fp8(torch.ones(4, 128), 128)
assert CliRunner().invoke(cli.app, ["support"]).exit_code == 0
"""


def run(code: str) -> str:
    """Warnings and errors of a new process."""
    command = [sys.executable, "-W", "default", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_the_absence_of_numpy_causes_no_warning():
    assert "numpy" not in run(WITHOUT_NUMPY).lower()


FIRST_USE = """
import sys
import mlakit
mlakit.knobs.override
assert "torch" not in sys.modules
assert mlakit.mla_decode is mlakit.ops.mla_decode
assert "mla_decode" in vars(mlakit)
assert set(mlakit.__all__) <= set(dir(mlakit))
assert {"CachedBatch", "__version__"} <= set(mlakit.__all__)
from mlakit import *
CAUSAL, PagedLatentCache, sparse_mla
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(FIRST_USE, id="names"),
        pytest.param("import torch, mlakit; torch.ops.mlakit.mla_decode", id="ops, torch first"),
        pytest.param("import mlakit.ops, torch; torch.ops.mlakit.mla_decode", id="ops"),
    ],
)
def test_importing_the_package_gives_its_names_and_ops(code):
    run(code)


def test_what_is_no_public_name_is_an_attribute_error():
    import mlakit

    for name in ("mla_encode", "_private", "no.module", ""):
        with pytest.raises(AttributeError, match=f"module 'mlakit' has no attribute '{name}'"):
            getattr(mlakit, name)
