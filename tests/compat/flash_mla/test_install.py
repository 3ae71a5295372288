"""The drop-in for FlashMLA takes its name: `install`, `uninstall`, and the page about it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from mlakit.compat import flash_mla, installation
from mlakit.compat.flash_mla import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from tests.paths import ROOT


@pytest.fixture
def no_other(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if no other flash_mla were on this machine; ours is gone when the test ends."""
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_mla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    yield
    flash_mla.uninstall()


@pytest.mark.usefixtures("no_other")
def test_import_finds_it_while_it_is_installed():
    flash_mla.install()
    installed = import_module("flash_mla")
    interface = import_module("flash_mla.flash_mla_interface")
    assert installed.flash_mla_with_kvcache is flash_mla_with_kvcache
    assert interface.get_mla_metadata is get_mla_metadata
    assert installed.flash_mla_interface is interface
    assert installed.__version__ == flash_mla.__version__ == "1.0.0"
    assert find_spec("flash_mla") is installed.__spec__
    scope: dict[str, Any] = {}
    exec("import flash_mla.flash_mla_interface as i\nfrom flash_mla import *", scope)
    assert scope["i"] is interface
    assert scope["flash_mla_sparse_fwd"] is flash_mla_sparse_fwd
    with pytest.raises(ImportError, match=r"flash_mla\.cuda"):
        import_module("flash_mla.cuda")
    flash_mla.uninstall()
    assert "flash_mla" not in sys.modules
    flash_mla.uninstall()


@pytest.mark.usefixtures("no_other")
def test_every_name_of_flash_mla_is_there():
    with flash_mla.install():
        installed = import_module("flash_mla")
        for name in (
            *("get_mla_metadata", "flash_mla_with_kvcache", "flash_mla_sparse_fwd"),
            *("flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func"),
            *("flash_attn_varlen_kvpacked_func", "FlashMLASchedMeta", "__version__"),
        ):
            assert getattr(installed, name) is getattr(flash_mla, name)
    assert "flash_mla" not in sys.modules


@pytest.mark.usefixtures("no_other")
def test_installing_twice_is_installing_once():
    flash_mla.install()
    before = sys.modules["flash_mla"]
    flash_mla.install()
    assert sys.modules["flash_mla"] is before
    flash_mla.uninstall()
    assert "flash_mla" not in sys.modules


@pytest.mark.usefixtures("no_other")
def test_an_imported_flash_mla_is_not_hidden_by_accident(monkeypatch):
    real, cuda = ModuleType("flash_mla"), ModuleType("flash_mla.cuda")
    monkeypatch.setitem(sys.modules, "flash_mla", real)
    monkeypatch.setitem(sys.modules, "flash_mla.cuda", cuda)
    with pytest.raises(RuntimeError, match=r"another flash_mla is already imported.*force=True"):
        flash_mla.install()
    assert sys.modules["flash_mla"] is real
    with flash_mla.install(force=True):
        assert import_module("flash_mla").get_mla_metadata is get_mla_metadata
        assert "flash_mla.cuda" not in sys.modules
    assert sys.modules["flash_mla"] is real
    assert sys.modules["flash_mla.cuda"] is cuda
    assert "flash_mla.flash_mla_interface" not in sys.modules


@pytest.mark.slow
def test_an_installed_flash_mla_is_not_hidden_by_accident(tmp_path):
    """In a process of its own, which has a flash_mla that it could import."""
    (tmp_path / "flash_mla").mkdir()
    (tmp_path / "flash_mla" / "__init__.py").write_text("real = True\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from mlakit.compat.flash_mla import install
try:
    install()
except RuntimeError as error:
    print(error)
with install(force=True):
    import flash_mla
    print(hasattr(flash_mla, "real"))
import flash_mla
print(flash_mla.real)
"""
    refused, *rest = run_python(code).splitlines()
    assert "another flash_mla is installed, in" in refused
    assert rest == ["False", "True"]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


PAGE = (ROOT / "docs" / "flash_mla.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_examples_of_the_page_run_and_print_what_they_say():
    blocks = [(match[1], match[2]) for match in FENCE.finditer(PAGE)]
    assert [language for language, _ in blocks] == ["python", "text"]
    assert run_python(blocks[0][1]) == blocks[1][1]


def test_the_page_speaks_of_every_name():
    assert [name for name in flash_mla.__all__ if f"`{name}" not in PAGE] == []
