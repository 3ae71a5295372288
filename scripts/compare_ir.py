"""Compares the IR of all compile checks between two checkouts of mlakit, without a GPU.

    python scripts/compare_ir.py record FOLDER before.json.gz
    python scripts/compare_ir.py record . after.json.gz
    python scripts/compare_ir.py diff before.json.gz after.json.gz

`record` makes the IR of every kernel that a configuration of `mlakit support --compile` launches:
TTGIR of Gluon kernels, TTIR of the portable ones. Locations, names and the order of arguments are
normalised, so that a change which moves or renames code has the same IR. `diff` lists the kernels
that differ, and shows the first difference. The checkout's own modules are found at run time,
wherever its version of mlakit has them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import sys
from collections import ChainMap
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from difflib import unified_diff
from importlib import import_module
from importlib.util import find_spec
from itertools import count, zip_longest
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.progress import track

# where a version of mlakit has a module, the newest first
MODULES = {
    "launch": ("mlakit.kernels.launch", "mlakit.kernels.triton.launch"),
    "configurations": ("mlakit.tools.compile.configurations", "mlakit.support.configurations"),
    "compilation": ("mlakit.tools.compile.compilation", "mlakit.support.compilation"),
    "lowering": ("mlakit.tools.emulator.lowering",),
}
LOCATION = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)|^#loc.*\n|^.*= loc\(.*\n", re.MULTILINE)
SYMBOL = re.compile(r"@(?:\"[^\"]*\"|[\w.$]+)")
VALUE = re.compile(r"%[\w.$-]+")
RESULTS = re.compile(r"(\s*(?:%[\w.$:-]+(?:, )?)+ = )?(.*)", re.DOTALL)
REGION_VALUE = re.compile(r"%[\w.$-]+(?= = %|: )")
FUNCTION = re.compile(
    r"(tt\.func [^(]*)\((.*?)\)((?: -> .*?)? attributes \{.*?\})? \{\n", re.DOTALL
)
DIFFERENT_LINES = 40  # of the first kernel that differs, which are shown
CONSOLE = Console()


def find(name: str) -> ModuleType:
    for module in MODULES[name]:
        try:
            if find_spec(module) is not None:
                return import_module(module)
        except ModuleNotFoundError:  # a package above it is not there
            continue
    sys.exit(f"the checkout has none of {', '.join(MODULES[name])}")


def normalised(text: str) -> str:
    """Return an IR without locations; values and functions are numbered as their uses come.

    Arguments are listed by type, since each is numbered by its first use. Those that a function
    does not use are left out.
    """
    text = LOCATION.sub("", text)
    symbols: dict[str, str] = {}
    text = SYMBOL.sub(lambda each: symbols.setdefault(each[0], f"@f{len(symbols)}"), text)
    pieces, end = [], 0
    functions = list(FUNCTION.finditer(text))
    for function, following in zip_longest(functions, functions[1:]):
        pieces.append(text[end : function.start()])
        end = function.end()
        used = set(VALUE.findall(text, end, following.start() if following else len(text)))
        arguments = [each for each in re.split(r", (?=%)", function[2]) if used & names(each)]
        listed = sorted(VALUE.sub("%", each) for each in arguments)
        pieces.append(f"{function[1]}({', '.join(listed)}){function[3] or ''} {{\n")
    return numbered("".join([*pieces, text[end:]]))


def names(text: str) -> set[str]:
    return set(VALUE.findall(text))


def numbered(text: str) -> str:
    """Number values by their definitions: isolated regions use one name for several values."""
    numbers = count()
    arguments: dict[str, str] = {}
    scopes: list[dict[str, str]] = [{}]
    lines = []
    for line in text.splitlines():
        if line.lstrip().startswith("}"):
            scopes.pop()
        scope = scopes[-1]
        results, operation = RESULTS.match(line).groups("")
        is_label = operation.lstrip().startswith("^")
        inner = scope if is_label else dict(scope)
        if is_label or line.endswith("{"):
            inner |= {name: f"%{next(numbers)}" for name in REGION_VALUE.findall(operation)}
        known = ChainMap(inner, arguments)
        for name in VALUE.findall(operation):
            if name not in known:
                arguments[name] = f"%a{len(arguments)}"
        operation = VALUE.sub(lambda each, known=known: known[each[0]], operation)
        scope |= {name: f"%{next(numbers)}" for name in VALUE.findall(results)}
        lines.append(VALUE.sub(lambda each, scope=scope: scope[each[0]], results) + operation)
        if line.endswith("{"):
            scopes.append(inner)
    return "\n".join(lines)


def make_ir(check: tuple[str, int]) -> tuple[str, dict[str, str]]:
    """Return the name of a check, and the IR of its kernels by name and number."""
    import triton

    name, arch = check
    launch, configurations = find("launch"), find("configurations")
    lower, num_sms = find("lowering").lower, find("compilation").NUM_SMS
    texts: list[tuple[str, str]] = []

    def warm_up(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        lowered = lower(kernel, args, options, arch)
        of_launch = sorted(set(options) - set(kernel.arg_names))
        given = ", ".join(f"{key}={options[key]}" for key in of_launch)
        texts.append((kernel.__name__, f"{given}\n{normalised(lowered.text)}"))

    shared = (launch.SHARED_BYTES | launch.AMD_SHARED_BYTES)[arch]
    is_hopper = name in configurations.HOPPER
    case = (configurations.HOPPER | configurations.CONFIGURATIONS)[name]
    jit = triton.runtime.jit.JITFunction
    before, jit.warmup = jit.warmup, warm_up
    try:
        trial = case.trial("cpu")
        with launch.compiling(launch.Target(arch, num_sms[arch], shared)):
            trial.call("hopper" if is_hopper else "triton")
    finally:
        jit.warmup = before
    kernels = {f"{kernel} {i}": text for i, (kernel, text) in enumerate(texts)}
    return f"{name} on {arch}", kernels


def record(folder: Path, output: Path, only: str, jobs: int) -> None:
    sys.path.insert(0, str(folder.resolve()))
    os.environ["PYTHONPATH"] = str(folder.resolve())  # of the processes that are started
    configurations = find("configurations")
    nvidia = set(configurations.ARCHITECTURES)
    checks = [each for each in configurations.all_checks() if only in each[0] and each[1] in nvidia]
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    with pool:
        made = pool.map(make_ir, checks)
        found = dict(track(made, total=len(checks), description="making IR", console=CONSOLE))
    with gzip.open(output, "wt", encoding="utf-8") as file:
        json.dump(found, file)
    CONSOLE.print(f"{len(found)} checks, {sum(map(len, found.values()))} kernels: {output}")


def read(path: Path) -> dict[str, Mapping[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content: dict[str, Mapping[str, str]] = json.load(file)
    return content


def diff(before: Path, after: Path) -> int:
    """Print what differs; return the number of kernels that do."""
    old, new = read(before), read(after)
    different = []
    for check in sorted({*old, *new}):
        own, others = old.get(check, {}), new.get(check, {})
        for kernel in sorted({*own, *others}):
            if own.get(kernel) != others.get(kernel):
                was, now = numbered(own.get(kernel, "")), numbered(others.get(kernel, ""))
                if was != now:
                    different.append((check, kernel, was, now))
    for check, kernel, was, now in different:
        CONSOLE.print(f"{check}: {kernel}{'' if was and now else ', on one side only'}")
    if different:
        _, _, was, now = different[0]
        lines = unified_diff(was.splitlines(), now.splitlines(), lineterm="", n=1)
        CONSOLE.print("\n".join(list(lines)[:DIFFERENT_LINES]), markup=False, highlight=False)
    kernels = sum(map(len, new.values()))
    CONSOLE.print(f"{len(new)} checks, {kernels} kernels, {len(different)} differ")
    return len(different)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="make the IR of a checkout")
    recorder.add_argument("folder", type=Path)
    recorder.add_argument("output", type=Path)
    recorder.add_argument("--only", default="", help="only configurations with this in their name")
    recorder.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    differ = commands.add_parser("diff", help="compare what two checkouts made")
    differ.add_argument("before", type=Path)
    differ.add_argument("after", type=Path)
    asked = parser.parse_args()
    if asked.command == "record":
        record(asked.folder, asked.output, asked.only, asked.jobs)
    else:
        sys.exit(1 if diff(asked.before, asked.after) else 0)


if __name__ == "__main__":
    main()
