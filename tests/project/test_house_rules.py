"""The rules of the code base, as tests: layers, names, imports, what is documented."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlakit
from tests.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it where the standard library has none
    import tomli as tomllib

PACKAGE = ROOT / "mlakit"

# lowest first; a module imports strictly lower layers, and nothing on its own. A folder is one
# layer, except for those in SPLIT, whose modules have layers of their own
LAYERS = (
    "_version dispatch.architectures dispatch.autocast dispatch.names dispatch.private"
    " dispatch.reprs",
    "dispatch.knobs",
    "dispatch.log",
    "dispatch.checks",
    "model",
    "dispatch.specs",
    "dispatch.proofs",
    "formats",
    "reference",
    "cache plan",
    "kernels",
    "launch_cache",
    "dispatch dispatch.selection",
    "dispatch.statistics",
    "ops",
    "steps",
    "parallel",
    "layer",
    "precompile",
    "geometry knobs specs",
    "_public",
    "__init__",
    "compat integrations",
    "tools tools.columns tools.options tools.testing",
    "tools.workloads",
    "tools.bench tools.check tools.compile",
    "tools.launch_records",
    "tools.accuracy tools.demo tools.doctor tools.emulator tools.generate tools.memory tools.prove"
    " tools.support tools.tiny",
    "tools.planner",
    "tools.commands",
    "tools.cli",
    "__main__",
)
SPLIT = ("dispatch", "tools")
RANK = {module: rank for rank, names in enumerate(LAYERS) for module in names.split()}
# an oracle imports nothing that it checks
ONLY = {"reference": {"dispatch.autocast", "formats", "model"}}
# a kernel trusts its caller
NEVER = {("kernels", "dispatch.checks"), ("kernels", "reference")}
# files that cannot be read without an optional package, and that others import late: device code
# with what launches it again, and subclasses of the package's classes
NEEDED_BY = {
    "triton": r"kernels/(?!(workspace|arguments)\.py)\w+\.py|launch_cache/launchers/.*"
    r"|kernels/(triton|hopper|blackwell)/(?!support|configs|decode/configs).*|tools/emulator/.*"
    r"|precompile/listing\.py",
    "transformers": r"integrations/transformers/"
    r"(cache_layers|layer_classes|static_cache|step_hooks|v4_hooks)\.py",
}
VAGUE_NAMES = {"utils", "util", "common", "misc", "helpers", "core", "v2"}
# the folders a developer's machine has and a user's has not
DEVELOPER_PATH = re.compile(r"(?<![\w.:/-])/(?:work|home|root|Users)/")

SOURCES = {
    path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}


def layer_of(module: str) -> str:
    """The layer of a module, such as cache of cache.pool, and dispatch.knobs of itself."""
    head, _, tail = module.partition(".")
    return f"{head}.{tail.split('.')[0]}" if head in SPLIT and tail else head


def imported_layers(source: str) -> Iterator[str]:
    """The layers that a source imports, anywhere in it; `.` for a relative import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            head, _, module = (node.module or "").partition(".")
            if node.level:
                yield "."
            elif head == "mlakit" and module in ("", *SPLIT):
                inner = [f"{module}.{each.name}".lstrip(".") for each in node.names]
                yield from (each if each in RANK else module or "__init__" for each in inner)
            elif head == "mlakit":
                yield layer_of(module)
        elif isinstance(node, ast.Import):
            for each in node.names:
                head, _, module = each.name.partition(".")
                if head == "mlakit":
                    yield layer_of(module) if module else "__init__"


def layer_of_file(path: str) -> str:
    """The layer of a file by its path in the package."""
    return layer_of(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))


def forbidden_imports(path: str, source: str) -> list[str]:
    """Imports in `path` (relative to the package) that do not point strictly downwards."""
    here = layer_of_file(path)

    def allowed(layer: str) -> bool:
        if layer == here:
            return True
        if (here, layer) in NEVER or layer not in ONLY.get(here, {layer}):
            return False
        return layer in RANK and RANK[layer] < RANK[here]

    return [f"{path} imports {each}" for each in imported_layers(source) if not allowed(each)]


def environment_reads(source: str) -> list[str]:
    """Every way to the environment: `os.environ`, `os.getenv`, `from os import environ`."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in names:
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [name.name for name in node.names if name.name in names]
    return found


def is_script(source: str) -> bool:
    """Does the source ask whether it is `__main__`?"""
    return any(
        isinstance(node, ast.Compare)
        and any(isinstance(side, ast.Name) and side.id == "__name__" for side in ast.walk(node))
        for node in ast.walk(ast.parse(source))
    )


def imports_at_import_time(source: str) -> set[str]:
    """Top names of the packages that importing a source imports: not those inside functions."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if isinstance(node, ast.Import):
            found.update(name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def project_files() -> list[Path]:
    """What belongs to the project: git's list in a checkout, else the folders of a release."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    if (ROOT / ".git").exists():
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    folders = [PACKAGE, *(ROOT / name for name in ("tests", "docs", "examples", ".ci"))]
    nested = (path for folder in folders for path in folder.rglob("*"))
    return [
        path
        for path in (*ROOT.iterdir(), *nested)
        if path.is_file() and "__pycache__" not in path.parts
    ]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirement_name(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0]


@pytest.mark.parametrize("path", SOURCES)
def test_imports_point_strictly_downwards(path):
    assert forbidden_imports(path, SOURCES[path]) == []


def test_every_module_has_a_layer():
    layers = {layer_of_file(path) for path in SOURCES}
    assert layers <= set(RANK), f"give a layer to {sorted(layers - set(RANK))}"
    assert layers == set(RANK), f"nothing is in {sorted(set(RANK) - layers)}"


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("cache/pool.py", "from mlakit import ops", ["ops"]),
        ("cache/pool.py", "from mlakit import formats, ops", ["ops"]),
        ("cache/pool.py", "import mlakit.ops.decode", ["ops"]),
        ("cache/pool.py", "from mlakit.ops.decode import mla_decode", ["ops"]),
        ("cache/pool.py", "from mlakit import mla_decode", ["__init__"]),
        ("cache/pool.py", "import mlakit", ["__init__"]),
        ("cache/pool.py", "from mlakit.plan import DecodePlan", ["plan"]),
        ("cache/pool.py", "from mlakit.dispatch import explain", ["dispatch"]),
        ("cache/pool.py", "from mlakit.dispatch import knobs, selection", ["dispatch.selection"]),
        ("cache/pool.py", "from mlakit.unheard_of import x", ["unheard_of"]),
        ("cache/pool.py", "def f():\n    from mlakit import ops", ["ops"]),
        ("cache/pool.py", "if TYPE_CHECKING:\n    from mlakit.layer import x", ["layer"]),
        ("ops/decode.py", "from .prefill import x", ["."]),
        ("ops/decode.py", "from . import prefill", ["."]),
        ("ops/decode.py", "from ..cache import x", ["."]),
        ("reference/decode.py", "from mlakit.dispatch import knobs", ["dispatch.knobs"]),
        ("reference/decode.py", "from mlakit.dispatch.checks import Dims", ["dispatch.checks"]),
        ("kernels/cpu/decode.py", "from mlakit.dispatch import checks", ["dispatch.checks"]),
        ("kernels/triton/decode.py", "import mlakit.reference.decode", ["reference"]),
        ("layer/attention.py", "from mlakit.tools.testing import x", ["tools.testing"]),
        ("tools/columns.py", "from mlakit.tools import cli", ["tools.cli"]),
        ("cache/pool.py", "import os\nfrom mlakit.formats import x\nimport mlakit.model.rope", []),
        ("ops/decode.py", "from mlakit.ops._library import register", []),
        ("kernels/cpu/decode.py", "from mlakit.dispatch import knobs", []),
        ("reference/decode.py", "from mlakit.model.masks import CAUSAL", []),
        ("tools/cli.py", "from mlakit import __version__\nfrom mlakit.tools import demo", []),
        ("cache/pool.py", "import mlakitchen\nfrom mlakitchen.ops import x", []),
    ],
)
def test_the_import_checker_sees(path, source, found):
    assert forbidden_imports(path, source) == [f"{path} imports {each}" for each in found]


@pytest.mark.slow
def test_import_touches_no_device_and_no_optional_package_and_works_without_them():
    code = """
import os, sys, torch
child = os.fork()  # torch is imported once for both halves
if child == 0:
    sys.modules["triton"] = sys.modules["transformers"] = None
    import mlakit, mlakit.dispatch.selection, mlakit.integrations.transformers
    import mlakit.tools.cli, mlakit.tools.testing
    os._exit(0)
without_them = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
import mlakit, mlakit.dispatch.selection, mlakit.integrations.transformers
loaded = [name for name in ("triton", "transformers") if name in sys.modules]
print(without_them, torch.cuda.is_initialized(), loaded)
"""
    assert run_python(code) == "0 False []"


@pytest.mark.slow
def test_optional_packages_are_imported_late():
    optional = {"transformers", "matplotlib", "vllm", "flash_mla", "flashinfer", "triton"}
    for path, source in SOURCES.items():
        allowed = {name for name, pattern in NEEDED_BY.items() if re.fullmatch(pattern, path)}
        early = (imports_at_import_time(source) & optional) - allowed
        assert not early, f"{path} imports {early} when it is imported"


@pytest.mark.slow
def test_nothing_outside_imports_the_tools():
    importers = {
        path
        for path, source in SOURCES.items()
        if any(each.startswith("tools") for each in imported_layers(source))
    }
    assert {path for path in importers if not path.startswith("tools/")} == {"__main__.py"}


@pytest.mark.slow
def test_only_its_command_imports_the_emulator_and_late():
    """The wheel leaves it out."""
    importers = {
        path for path, source in SOURCES.items() if "tools.emulator" in imported_layers(source)
    }
    assert {path for path in importers if "emulator" not in path} == {"tools/commands/checks.py"}
    assert "mlakit.tools.emulator" not in early_modules(SOURCES["tools/commands/checks.py"])


def early_modules(source: str) -> set[str]:
    """The packages of tools that importing a source imports, as mlakit.tools.emulator."""
    tree = ast.parse(source)
    return {
        ".".join(each.module.split(".")[:3])
        for each in tree.body
        if isinstance(each, ast.ImportFrom) and each.module
    }


def test_the_late_import_checker_sees():
    assert early_modules("from mlakit.tools.emulator.x import y") == {"mlakit.tools.emulator"}
    assert early_modules("def f():\n    from mlakit.tools import emulator") == set()
    source = "import os\ntry:\n    import triton.language as tl\nexcept ImportError:\n    pass\n"
    assert imports_at_import_time(source) == {"os", "triton"}
    assert imports_at_import_time("class A:\n    from vllm.x import y") == {"vllm"}
    assert (
        imports_at_import_time("def f():\n    import triton\nasync def g():\n    import vllm")
        == set()
    )


@pytest.mark.slow
def test_only_knobs_reads_the_environment():
    readers = {path for path, source in SOURCES.items() if environment_reads(source)}
    assert readers == {"dispatch/knobs.py"}


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A']",
        "import os as o\no.getenv('A')",
        "from os import environ as e",
        "from os import path, getenv",
    ],
)
def test_the_environment_checker_sees(source):
    assert environment_reads(source)
    assert not environment_reads("import os\nos.path.join('environ', 'getenv')")


def default_tolerances(source: str) -> list[int]:
    """Lines that compare by torch's own tolerance, which knows nothing of what was summed."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("torch.testing.assert_close", "torch.allclose")
        and not {"rtol", "atol"} & {each.arg for each in node.keywords}
    ]


@pytest.mark.slow
def test_no_test_compares_by_a_tolerance_that_only_one_cpu_may_meet():
    tests = sorted((ROOT / "tests").rglob("*.py"))
    found = {str(path): default_tolerances(path.read_text(encoding="utf-8")) for path in tests}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_tolerance_checker_sees():
    assert default_tolerances("torch.testing.assert_close(a, b)") == [1]
    assert default_tolerances("x = 1\nassert torch.allclose(a, b, equal_nan=True)") == [2]
    assert default_tolerances("torch.testing.assert_close(a, b, rtol=0, atol=0)") == []
    assert default_tolerances('assert_matches("a", a, b, c)\nassert_close(a, b)') == []


@pytest.mark.slow
def test_only_the_main_module_is_a_script():
    assert {path for path, source in SOURCES.items() if is_script(source)} == {"__main__.py"}


def test_the_script_checker_sees():
    assert is_script('if __name__ == "__main__":\n    pass')
    assert is_script('if "__main__" == __name__:\n    pass')
    assert not is_script("logger = getLogger(__name__)")


# options of a launch, which Triton takes from a kernel's argument of the same name
LAUNCH_OPTIONS = {
    *("num_warps", "num_ctas", "num_stages", "maxnreg", "launch_pdl", "launch_cooperative_grid"),
    *("grid", "warmup", "debug", "arch", "warp_size", "waves_per_eu", "enable_fp_fusion"),
}


def arguments_that_are_options(source: str) -> list[str]:
    """Return the arguments of kernels that have the name of an option."""
    return [
        argument.arg
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
        for argument in node.args.args
        if argument.arg in LAUNCH_OPTIONS
    ]


def test_no_argument_of_a_kernel_is_an_option_of_its_launch():
    found = {path: arguments_that_are_options(source) for path, source in SOURCES.items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_argument_checker_sees():
    assert arguments_that_are_options("def a_kernel(x, num_ctas): pass") == ["num_ctas"]
    assert arguments_that_are_options("def a_kernel(x, plan_ctas): pass") == []
    assert arguments_that_are_options("def launch_it(x, num_ctas): pass") == []


def vague_words(path: Path) -> set[str]:
    return {word for part in path.parts for word in Path(part).stem.split("_")} & VAGUE_NAMES


@pytest.mark.slow
def test_no_file_has_a_name_that_says_nothing():
    names = [path.relative_to(ROOT) for path in project_files()]
    assert [name for name in names if vague_words(name)] == []


def test_the_name_checker_sees():
    assert vague_words(Path("mlakit/utils.py")) == {"utils"}
    assert vague_words(Path("mlakit/core/decode.py")) == {"core"}
    assert vague_words(Path("tests/decode_v2.py")) == {"v2"}
    assert not vague_words(Path("mlakit/score_mods.py"))


def test_run_time_requirements_are_not_pinned():
    project = pyproject()["project"]
    required = {requirement_name(line): line for line in project["dependencies"]}
    assert {"torch", "triton"} <= set(required)
    assert not [line for line in required.values() if "==" in line.split(";")[0]]
    assert project["requires-python"] == ">=3.10"


def test_the_installed_version_is_the_version_of_the_source():
    assert "version" in pyproject()["project"]["dynamic"]
    assert importlib.metadata.version("mlakit") == mlakit.__version__


@pytest.mark.slow
def test_no_file_names_a_path_of_a_developers_machine():
    found = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        lines = enumerate(text.splitlines(), start=1)
        found += [f"{path.name}:{i}" for i, line in lines if DEVELOPER_PATH.search(line)]
    assert found == []


@pytest.mark.parametrize("folder", ["work", "home", "root", "Users"])
def test_the_path_checker_sees(folder):
    path = f"/{folder}/someone/project"
    for text in (path, f"see {path}", f'"{path}"', f"({path})", f"~{path}", f"=`{path}`"):
        assert DEVELOPER_PATH.search(text), text
    for text in (f"https://example.org{path}", f"net{path}", f"./a{path}"):
        assert not DEVELOPER_PATH.search(text), text


def test_the_project_files_are_found():
    names = {path.relative_to(ROOT).as_posix() for path in project_files()}
    assert {"pyproject.toml", "mlakit/__init__.py", "tests/project/test_house_rules.py"} <= names
    assert not any(name.startswith((".venv/", ".git/")) for name in names)
