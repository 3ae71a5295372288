"""TTGIR text -> operations. One line is one operation, or opens or closes a region."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SSA = re.compile(r"%[A-Za-z0-9_.$-]+(?:#\d+)?")


@dataclass
class Region:
    args: list[str] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    num_warps: int = 0  # of a warp partition


@dataclass
class Op:
    name: str
    results: list[str]
    operands: list[str]
    text: str  # between the name and the types
    types: str  # after the last top-level colon
    loc: str
    line: int
    regions: list[Region] = field(default_factory=list)
    inits: list[tuple[str, str]] = field(default_factory=list)  # of a loop: (argument, value)

    @property
    def result_type(self) -> str:
        """Of the first result; the type of the operands where they are the same."""
        text = self.types.split("->")[-1].strip()
        if text.startswith("("):
            text = text[1:-1]
        return split_top(text.split(" to ")[-1], ",")[0].strip()

    def operand_types(self) -> list[str]:
        return [each.strip() for each in split_top(self.types.split("->")[0].strip(), ",")]

    def attr(self, name: str, default: str | None = None) -> str | None:
        """The text of an attribute in `{...}` or `<{...}>`."""
        found = re.search(rf"[{{,<]\s*{name}\s*=\s*(array<[^>]*>|\"[^\"]*\"|[^,}}]+)", self.text)
        return found.group(1).strip() if found else default

    def int_attr(self, name: str, default: int | None = None) -> int:
        value = self.attr(name)
        if value is None:
            assert default is not None, f"{self.name} has no {name}: {self.text}"
            return default
        return int(value.split(":")[0])

    def array_attr(self, name: str) -> list[int]:
        value = self.attr(name)
        assert value is not None, self.text
        return [int(each) for each in re.findall(r"-?\d+", value.split(":", 1)[-1])]


@dataclass
class Function:
    name: str
    args: list[tuple[str, str]]  # (name, type)
    body: Region
    is_public: bool


@dataclass
class Module:
    attributes: dict[str, str]  # alias of a layout -> its text
    functions: dict[str, Function]
    locations: dict[str, str]
    num_warps: int
    num_ctas: int
    lines: list[str]

    @property
    def kernel(self) -> Function:
        return next(each for each in self.functions.values() if each.is_public)

    def where(self, loc: str) -> str:
        """file:line of an operation, innermost first; three frames."""
        frames: list[str] = []
        self._frames(loc, frames, 0)
        return " <- ".join(dict.fromkeys(frames)) or loc

    def _frames(self, loc: str, frames: list[str], depth: int) -> None:
        if depth > 12 or len(frames) > 3:
            return
        text = self.locations.get(loc, loc)
        call = re.match(r"callsite\((#loc\d*|.*) at (#loc\d*)\)$", text)
        if call:
            self._frames(call.group(1), frames, depth + 1)
            self._frames(call.group(2), frames, depth + 1)
            return
        file = re.search(r'"([^"]*\.py)":(\d+)', text)
        if file:
            frames.append(f"{file.group(1).rsplit('/', 1)[-1]}:{file.group(2)}")
            return
        named = re.match(r'"[^"]*"\((#loc\d*)\)', text)
        if named:
            self._frames(named.group(1), frames, depth + 1)


def split_top(text: str, separator: str) -> list[str]:
    """Split at separators outside of brackets and quotes."""
    parts, depth, start, quoted = [], 0, 0, False
    for i, char in enumerate(text):
        if char == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif char in "<([{":
            depth += 1
        elif char in ")]}" or (char == ">" and text[i - 1] != "-"):
            depth -= 1
        elif char == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return parts


def _without_locations(line: str) -> tuple[str, str]:
    """The line without `loc(...)`, and the last of them."""
    out, loc, i = [], "", 0
    while True:
        j = line.find("loc(", i)
        if j < 0 or (j > 0 and line[j - 1] not in " "):
            if j < 0:
                out.append(line[i:])
                break
            out.append(line[i : j + 4])
            i = j + 4
            continue
        depth, k, quoted = 1, j + 4, False
        while depth:
            char = line[k]
            if char == '"':
                quoted = not quoted
            elif not quoted:
                depth += (char == "(") - (char == ")")
            k += 1
        out.append(line[i:j].rstrip(" "))
        loc, i = line[j + 4 : k - 1], k
    return "".join(out).rstrip(), loc


def _split_types(text: str) -> tuple[str, str]:
    """(before, after) the last top-level ` : `."""
    depth, quoted, at = 0, False, -1
    for i, char in enumerate(text):
        if char == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif char in "<([{":
            depth += 1
        elif char in ")]}" or (char == ">" and text[i - 1] != "-"):
            depth -= 1
        elif char == ":" and depth == 0 and text[i - 1] in " )" and i + 1 < len(text):
            at = i
            break
    return (text, "") if at < 0 else (text[:at].rstrip(), text[at + 1 :].strip())


class _Parser:
    def __init__(self, text: str) -> None:
        self.raw = text.splitlines()
        self.locations: dict[str, str] = {}
        self.attributes: dict[str, str] = {}
        self.lines: list[tuple[str, str, int]] = []  # (text, loc, number)
        for number, raw in enumerate(self.raw):
            alias = re.match(r"#(\w+) = (.*)$", raw)
            if alias and alias.group(1).startswith("loc"):
                body = alias.group(2)
                self.locations["#" + alias.group(1)] = body[body.index("(") + 1 : body.rindex(")")]
            elif alias:
                self.attributes["#" + alias.group(1)] = alias.group(2)
            elif raw.strip():
                line, loc = _without_locations(raw.strip())
                self.lines.append((line, loc, number))
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

        def number(name: str) -> int:
            found = re.search(rf'"?{name}"? = (\d+)', head)
            return int(found.group(1)) if found else 1

        return Module(
            self.attributes,
            functions,
            self.locations,
            number("ttg.num-warps"),
            number("ttg.num-ctas"),
            self.raw,
        )

    def _function(self, line: str) -> Function:
        found = re.match(r'tt\.func (public|private) @("[^"]*"|[\w.$]+)\(', line)
        assert found, line
        depth, end = 1, found.end()
        quoted = False
        while depth:
            char = line[end]
            if char == '"':
                quoted = not quoted
            elif not quoted:
                depth += (char == "(") - (char == ")")
            end += 1
        args = []
        for each in split_top(line[found.end() : end - 1], ","):
            if each.strip():
                name, type = each.strip().split(":", 1)
                args.append((name.strip(), type.split(" {tt.")[0].strip()))
        self.at += 1
        body = self._region([name for name, _ in args])
        return Function(found.group(2).strip('"'), args, body, found.group(1) == "public")

    def _region(self, args: list[str]) -> Region:
        """Operations up to the line that closes the region, where `at` then is."""
        region = Region(list(args))
        while True:
            line, loc, number = self.lines[self.at]
            if line.startswith("}"):
                return region
            if line.startswith("^"):
                inside = line[line.index("(") + 1 : line.rindex(")")] if "(" in line else ""
                region.args += [
                    each.split(":")[0].strip() for each in split_top(inside, ",") if each.strip()
                ]
            elif line.startswith("ttg.warp_specialize") or re.search(
                r"= ttg\.warp_specialize", line
            ):
                region.ops.append(self._warp_specialize(line, number))
            else:
                region.ops.append(self._op(line, loc, number))
            self.at += 1

    def _warp_specialize(self, line: str, number: int) -> Op:
        results, rest = _results(line)
        inside = rest[rest.index("(") + 1 : rest.index(")")]
        op = Op("ttg.warp_specialize", results, SSA.findall(inside), rest, "", "", number)
        self.at += 1
        while True:
            line, _, _ = self.lines[self.at]
            if line.startswith("default"):
                self.at += 1
                op.regions.append(self._region([]))
            elif line.startswith("partition"):
                inside = line[line.index("(") + 1 : line.rindex(") num_warps")]
                args = [
                    each.split(":")[0].strip() for each in split_top(inside, ",") if each.strip()
                ]
                warps = re.search(r"num_warps\((\d+)\)", line)
                self.at += 1
                region = self._region(args)
                region.num_warps = int(warps.group(1)) if warps else 0
                op.regions.append(region)
            closing, loc, _ = self.lines[self.at]
            if closing.startswith("} :"):
                op.loc = loc
                return op
            self.at += 1

    def _op(self, line: str, loc: str, number: int) -> Op:
        results, rest = _results(line)
        opens = rest.endswith("{")
        body = rest[:-1].rstrip() if opens else rest
        if opens and body.endswith("("):
            body = body[:-1].rstrip()
        name = re.match(r'"?([\w.]+)"?', body)
        assert name, line
        tail = body[name.end() :]
        text, types = _split_types(tail)
        op = Op(name.group(1), results, [], text, types, loc, number)
        if op.name == "scf.for":
            found = re.match(r" (?:unsigned )?(%\S+) = (%\S+) to (%\S+) step (%\S+)", text)
            assert found, line
            op.operands = list(found.groups()[1:])
            op.inits = _inits(text)
            args = [found.group(1)] + [name for name, _ in op.inits]
        elif op.name == "scf.while":
            op.inits = _inits(text)
            args = [name for name, _ in op.inits]
        else:
            op.operands = SSA.findall(re.sub(r'"(?:[^"\\]|\\.)*"', "", text))
            args = []
        while opens:
            self.at += 1
            op.regions.append(self._region(args))
            closing, end_loc, _ = self.lines[self.at]
            op.loc = end_loc or op.loc
            args = []
            opens = closing.endswith("{")  # `} else {`, `} do {`
            if closing.startswith("})"):
                op.types = closing[closing.index(":") + 1 :].strip()
        return op


def _results(line: str) -> tuple[list[str], str]:
    found = re.match(r"((?:%[^\s,:=]+(?::\d+)?(?:, )?)+) = ", line)
    if not found:
        return [], line
    results = []
    for each in found.group(1).split(", "):
        name, _, count = each.partition(":")
        results += [f"{name}#{i}" for i in range(int(count))] if count else [name]
    return results, line[found.end() :]


def _inits(text: str) -> list[tuple[str, str]]:
    inside = re.search(r"(?:iter_args)?\((.*)\)", text)
    pairs = re.findall(r"(%\S+) = (%[^\s,)]+)", inside.group(1)) if inside else []
    return pairs


def parse(text: str) -> Module:
    return _Parser(text).module()
