"""The check of what is about to be released sees what is wrong; the workflows use it."""

from __future__ import annotations

import importlib.util
import re
import tarfile
import zipfile

import pytest

import mlakit
from tests.paths import ROOT

_SPEC = importlib.util.spec_from_file_location("check_release", ROOT / "scripts/check_release.py")
check_release = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(check_release)

METADATA = f"Name: mlakit\nVersion: {mlakit.__version__}\n\n[docs](https://example.org)\n"
GOOD = {
    **dict.fromkeys(check_release.NEEDED, ""),
    "mlakit-0.dist-info/METADATA": METADATA,
    "mlakit-0.dist-info/licenses/LICENSE": "",
}
SOURCES = (*check_release.NEEDED, *check_release.OF_SOURCES, "mlakit/tools/emulator/__init__.py")


def release(folder, files, sources=SOURCES):
    with zipfile.ZipFile(folder / "mlakit-0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    empty = folder / "empty"
    empty.touch()
    with tarfile.open(folder / "mlakit-0.tar.gz", "w:gz") as archive:
        for name in sources:
            archive.add(empty, f"mlakit-0/{name}")
    return list(check_release.complaints(folder))


def test_a_whole_release_has_no_complaint(tmp_path):
    assert release(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"mlakit/tools/emulator/core.py": ""}, "has mlakit/tools/emulator/core.py"),
        ({"tests/conftest.py": ""}, "has tests/conftest.py"),
        ({"mlakit/py.typed": None}, "lacks mlakit/py.typed"),
        ({"mlakit-0.dist-info/licenses/LICENSE": None}, "lacks LICENSE"),
        ({"mlakit-0.dist-info/METADATA": "Version: 0.0.9\n"}, "is not of version"),
        ({"mlakit-0.dist-info/METADATA": METADATA + "[a](docs/a.md)"}, "the link to docs/a.md"),
    ],
)
def test_it_sees_what_is_wrong_with_a_wheel(tmp_path, changed, complaint):
    files = {name: text for name, text in (GOOD | changed).items() if text is not None}
    (found,) = release(tmp_path, files)
    assert complaint in found


def test_it_sees_what_a_source_release_lacks(tmp_path):
    (found,) = release(tmp_path, GOOD, SOURCES[1:])
    assert found.endswith("lacks mlakit/__init__.py")
    (tmp_path / "second-0.tar.gz").write_bytes((tmp_path / "mlakit-0.tar.gz").read_bytes())
    assert any(
        "must have one *.tar.gz, it has 2" in each for each in check_release.complaints(tmp_path)
    )


def test_the_changelog_has_the_version_that_is_released():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", text, flags=re.MULTILINE)
    assert released[0] == mlakit.__version__.partition(".dev")[0]
    assert text.index("## [Unreleased]") < text.index(f"## [{released[0]}]")


@pytest.mark.parametrize(
    ("workflow", "parts"),
    [
        ("release.yml", ("id-token: write", "gh-action-pypi-publish", "scripts/check_release.py")),
        ("docs.yml", ("mkdocs build --strict", "actions/deploy-pages")),
    ],
)
def test_the_workflows_publish_what_was_checked(workflow, parts):
    text = (ROOT / ".github" / "workflows" / workflow).read_text(encoding="utf-8")
    assert all(part in text for part in parts)
    assert "password" not in text
