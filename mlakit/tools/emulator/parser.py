"""A reader of TTGIR text: one line is one operation, or opens or closes a region.

It reads what Triton 3.6 to 3.9 print. It keeps types and attributes as text and checks no
semantics: the compiler that printed the text has verified it.
"""

from __future__ import annotations

import re

from mlakit.tools.emulator.ir import SSA, Block, Function, Module, Op, Region, Unsupported
from mlakit.tools.emulator.scanning import (
    end_of_parenthesis,
    split_top,
    split_types,
    strip_locations,
)

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_RESULTS = re.compile(r"((?:%[^\s,:=]+(?::\d+)?(?:, )?)+) = ")
_WARP_SPECIALIZE = re.compile(r"(?:%\S+ = )?ttg\.warp_specialize\b")
_FOR = re.compile(r" (?:unsigned )?(%\S+) = (%\S+) to (%\S+) step (%\S+)")


def parse(text: str) -> Module:
    """Read a module from its text."""
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        self.raw = text.splitlines()
        self.locations: dict[str, str] = {}
        self.attributes: dict[str, str] = {}
        self.lines: list[tuple[str, str, int]] = []  # (text, location, index in `raw`)
        for number, raw in enumerate(self.raw):
            alias = re.match(r"#(\w+) = (.*)$", raw)
            if alias and alias.group(1).startswith("loc"):
                body = alias.group(2)
                self.locations["#" + alias.group(1)] = body[body.index("(") + 1 : body.rindex(")")]
            elif alias:
                self.attributes["#" + alias.group(1)] = alias.group(2)
            elif raw.strip():
                line, location = strip_locations(raw.strip())
                self.lines.append((line, location, number))
        self.at = 0

    def module(self) -> Module:
        functions: dict[str, Function] = {}
        head = ""
        while self.at < len(self.lines):
            line, _, _ = self.lines[self.at]
            if line.startswith("module"):
                head = line
            elif line.startswith("tt.func"):
                function = self._function(line)
                functions[function.name] = function
            self.at += 1
        return Module(
            attributes=self.attributes,
            functions=functions,
            locations=self.locations,
            num_warps=_module_attribute(head, "ttg.num-warps"),
            num_ctas=_module_attribute(head, "ttg.num-ctas"),
            lines=self.raw,
        )

    def _function(self, line: str) -> Function:
        found = re.match(r'tt\.func (public|private) @("[^"]*"|[\w.$]+)\(', line)
        if not found:
            raise self._unreadable(line)
        end = end_of_parenthesis(line, found.end())
        args: list[tuple[str, str]] = []
        for each in split_top(line[found.end() : end - 1], ","):
            if each.strip():
                name, type = each.strip().split(":", 1)
                args.append((name.strip(), type.split(" {tt.")[0].strip()))
        self.at += 1
        body = self._region([name for name, _ in args])
        return Function(
            name=found.group(2).strip('"'),
            args=args,
            body=body,
            is_public=found.group(1) == "public",
        )

    def _region(self, args: list[str]) -> Region:
        """Read operations up to the line that closes the region, and stop at that line."""
        block = Block(label="", args=list(args))
        region = Region([block])
        while True:
            line, location, number = self.lines[self.at]
            if line.startswith("}"):
                return region
            if line.startswith("^"):
                block = self._open_block(region, line)
            elif _WARP_SPECIALIZE.match(line):
                block.ops.append(self._warp_specialize(line, number))
            else:
                block.ops.append(self._op(line, location, number))
            self.at += 1

    def _open_block(self, region: Region, line: str) -> Block:
        """Read a label; one before all operations names the arguments of the region itself."""
        found = re.match(r"(\^\w+)(?:\((.*)\))?:", line)
        if not found:
            raise self._unreadable(line)
        args = _argument_names(found.group(2) or "")
        first = region.blocks[0]
        if len(region.blocks) == 1 and not first.ops:
            first.label = found.group(1)
            first.args += args
            return first
        block = Block(label=found.group(1), args=args)
        region.blocks.append(block)
        return block

    def _warp_specialize(self, line: str, number: int) -> Op:
        results, rest = _split_results(line)
        captured = rest[rest.index("(") + 1 : rest.index(")")]
        op = Op(
            name="ttg.warp_specialize",
            results=results,
            operands=SSA.findall(captured),
            text=rest,
            types="",
            location="",
            line=number,
        )
        self.at += 1
        while True:
            line, _, _ = self.lines[self.at]
            if line.startswith("default"):
                self.at += 1
                op.regions.append(self._region([]))
            elif line.startswith("partition"):
                op.regions.append(self._partition(line))
            closing, location, _ = self.lines[self.at]
            if closing.startswith("} :"):
                op.location = location
                return op
            self.at += 1

    def _partition(self, line: str) -> Region:
        found = re.match(r"partition\d+\((.*)\) num_warps\((\d+)\)", line)
        if not found:
            raise self._unreadable(line)
        self.at += 1
        region = self._region(_argument_names(found.group(1)))
        region.num_warps = int(found.group(2))
        return region

    def _op(self, line: str, location: str, number: int) -> Op:
        results, rest = _split_results(line)
        opens = rest.endswith("{")
        body = rest[:-1].rstrip() if opens else rest
        if opens and body.endswith("("):
            body = body[:-1].rstrip()
        name = re.match(r'"?([\w.]+)"?', body)
        if not name:
            raise self._unreadable(line)
        text, types = split_types(body[name.end() :])
        op = Op(
            name=name.group(1),
            results=results,
            operands=[],
            text=text,
            types=types,
            location=location,
            line=number,
        )
        args = self._operands(op)
        while opens:
            self.at += 1
            op.regions.append(self._region(args))
            closing, end_location, _ = self.lines[self.at]
            op.location = end_location or op.location
            args = []
            opens = closing.endswith("{")  # `} else {`, `} do {`
            if closing.startswith("})"):
                op.types = closing[closing.index(":") + 1 :].strip()
        return op

    def _operands(self, op: Op) -> list[str]:
        """Set the operands of an operation; return the arguments of its first region."""
        if op.name == "scf.for":
            found = _FOR.match(op.text)
            if not found:
                raise self._unreadable(op.text)
            op.operands = list(found.groups()[1:])
            op.inits = _loop_inits(op.text)
            return [found.group(1)] + [name for name, _ in op.inits]
        if op.name == "scf.while":
            op.inits = _loop_inits(op.text)
            return [name for name, _ in op.inits]
        op.operands = SSA.findall(_QUOTED.sub("", op.text))
        return []

    def _unreadable(self, text: str) -> Unsupported:
        number = self.lines[self.at][2] + 1
        return Unsupported(
            f"line {number} of the IR has a form that the parser does not know: {text}"
        )


def _module_attribute(head: str, name: str) -> int:
    found = re.search(rf'"?{name}"? = (\d+)', head)
    return int(found.group(1)) if found else 1


def _argument_names(text: str) -> list[str]:
    """Return the names of `%a: i32, %b: tensor<...>`."""
    return [each.split(":")[0].strip() for each in split_top(text, ",") if each.strip()]


def _split_results(line: str) -> tuple[list[str], str]:
    """Return the names of an operation's results, and the rest of its line."""
    found = _RESULTS.match(line)
    if not found:
        return [], line
    results: list[str] = []
    for each in found.group(1).split(", "):
        name, _, count = each.partition(":")
        results += [f"{name}#{i}" for i in range(int(count))] if count else [name]
    return results, line[found.end() :]


def _loop_inits(text: str) -> list[tuple[str, str]]:
    """Return (argument, first value) of each value that a loop carries."""
    inside = re.search(r"(?:iter_args)?\((.*)\)", text)
    return re.findall(r"(%\S+) = (%[^\s,)]+)", inside.group(1)) if inside else []
