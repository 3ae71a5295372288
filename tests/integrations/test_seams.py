"""Names and signatures of an engine are read from its source, and releases are served by them."""

from __future__ import annotations

import importlib.metadata
import json
import warnings
import zipfile
from typing import Any

import pytest

from mlakit.integrations import releases
from mlakit.integrations.releases import Releases
from mlakit.integrations.seams import Seam, Source, missing, version_of
from mlakit.integrations.sglang.seams import RELEASES as SGLANG
from mlakit.integrations.vllm.seams import RELEASES as VLLM
from tests.paths import ROOT

FILES = {
    "engine/base.py": """
from engine.other import Root
class Base(Root):
    is_sparse: bool = False
    def __init__(self, q, *, scale):
        self.scale = scale
""",
    "engine/other.py": """
class Root:
    def run(self, q, **more): ...
    def stop(self, now): ...
""",
    "engine/layers/__init__.py": """
from typing import TYPE_CHECKING
from engine.base import Base as Layer
if TYPE_CHECKING:
    LIMIT: int
def register(name, path=None): ...
""",
}
WHOLE = {
    "Layer": Seam(
        "engine.layers",
        {"__init__": ("q", "scale"), "run": ("q", "anything"), "stop": ("now",)},
        overrides={"stop": ("now", "later")},
        attributes=("scale", "is_sparse"),
    ),
    "limit": Seam("engine.layers", names="LIMIT"),
    "register": Seam("engine.layers", {"": ("name", "path")}),
}


def lacks(version: str = "1.0", **seams: Seam) -> list[str]:
    return missing(seams, Source(FILES.get), version_of(version))


def test_what_is_there_is_found():
    assert lacks(**WHOLE) == []


@pytest.mark.parametrize(
    ("seam", "message"),
    [
        (Seam("engine.nowhere"), "engine.nowhere.Layer"),
        (Seam("engine.layers", names="Other"), "engine.layers.Other"),
        (Seam("engine.layers", {"walk": ()}), "engine.layers.Layer.walk"),
        (Seam("engine.layers", {"stop": ("later",)}), "engine.layers.Layer.stop(later=)"),
        (Seam("engine.layers", {"__init__": ("k",)}), "engine.layers.Layer.__init__(k=)"),
        (Seam("engine.layers", overrides={"stop": ()}), "engine.layers.Layer.stop without now="),
        (Seam("engine.layers", overrides={"walk": ()}), "engine.layers.Layer.walk"),
        (Seam("engine.layers", attributes=("size",)), "engine.layers.Layer.size"),
        (Seam("engine.layers", names="register", parameters={"": ("k",)}), "layers.register(k=)"),
        (Seam("engine.base", earlier=((2,), "engine.nowhere")), "engine.nowhere.Layer"),
    ],
)
def test_what_is_not_there_is_named(seam, message):
    (found,) = lacks(Layer=seam)
    assert found.endswith(message)


def test_a_seam_is_asked_of_the_releases_that_have_it():
    gone = Seam("engine.nowhere", since=(1, 1), before=(1, 3))
    assert [bool(lacks(each, gone=gone)) for each in ("1.0.9", "1.1", "1.2.5", "1.3.0")] == [
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.33.0", (0, 33, 0)),
        ("0.33.0rc1", (0, 33, 0)),
        ("0.32.0+cu130", (0, 32, 0)),
        ("0.5.15.post1", (0, 5, 15)),
    ],
)
def test_numbers_of_a_release(text, numbers):
    assert version_of(text) == numbers


def test_a_wheel_is_read(tmp_path):
    wheel = tmp_path / "engine.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    assert missing(WHOLE, Source.of_wheel(wheel), (1,)) == []


@pytest.fixture
def engine(monkeypatch, tmp_path) -> Any:
    """An engine that is installed in a release that is asked for."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    class Distribution:
        def locate_file(self, name: str) -> Any:
            return tmp_path / name

    def install(version: str, seams: dict[str, Seam]) -> Releases:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
        releases._why_not.cache_clear()
        return Releases("Engine", "engine", seams, run=("1.5",), first="1.0", last="2.0")

    yield install
    releases._why_not.cache_clear()


def test_the_release_is_read_once(engine, monkeypatch):
    """A step asks for names in every layer, and reading a release takes most of a millisecond."""
    read: list[str] = []
    served = engine("1.7", WHOLE)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: read.append(name) or "1.7")
    for _ in range(3):
        assert served.why_not() is None
        assert served.has("Layer")
    assert read == ["engine"]


@pytest.mark.parametrize("version", ["1.0", "1.5", "2.0", "1.7.post1"])
def test_a_release_in_the_range_is_taken_without_a_word(version, engine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine(version, WHOLE).why_not() is None


@pytest.mark.parametrize("version", ["0.9", "2.1"])
def test_a_release_out_of_the_range_is_taken_with_a_warning(version, engine):
    served = engine(version, WHOLE)
    with pytest.warns(UserWarning, match=f"{version} has every name it needs, but has not been"):
        assert served.why_not() is None


@pytest.mark.parametrize("version", ["0.9", "1.7"])
def test_a_release_that_lacks_a_name_is_refused(version, engine):
    seams = WHOLE | {"layer": Seam("engine.moved")}
    refusal = engine(version, seams).why_not()
    assert refusal.startswith("mlakit.integrations.engine: serves Engine 1.0 to 2.0, and")
    assert f"{version} lacks engine.moved.layer: pip install" in refusal


def test_a_release_that_tests_have_run_is_not_read(engine):
    served = engine("1.5", WHOLE | {"layer": Seam("engine.moved")})
    assert served.why_not() is None


@pytest.mark.parametrize("served", [VLLM, SGLANG], ids=lambda each: each.engine)
def test_every_release_in_the_range_was_read(served):
    table = json.loads((ROOT / "docs" / "data" / "engine-seams.json").read_text(encoding="utf-8"))
    read = table[served.engine]
    assert {served.first, served.last, *served.run} <= read.keys()
    assert all(lacks == [] for lacks in read.values())


@pytest.mark.parametrize("served", [VLLM, SGLANG], ids=lambda each: each.engine)
def test_an_engine_of_which_nothing_is_left_is_refused(served):
    version = version_of(served.last)
    found = missing(served.seams, Source({}.get), version)
    needed = [name for name, each in served.seams.items() if each.is_in(version)]
    assert len(found) == len(needed) > 10
