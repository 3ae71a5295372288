"""Inline assembly: PTX on all threads at once.

A register is an array of raw bits [warps, 32 lanes, groups]; a group is one of the invocations that
a thread makes, as each takes `packed_element` elements.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

from mlakit.tools.emulator.dtypes import E4M3, decode, encode
from mlakit.tools.emulator.scanning import split_top

_VIEWS = {
    "f32": np.float32,
    "s32": np.int32,
    "u32": np.uint32,
    "b32": np.uint32,
    "u64": np.uint64,
    "s64": np.int64,
    "b64": np.uint64,
    "b16": np.uint16,
    "f16": np.float16,
    "u16": np.uint16,
}
LANE_OPERATIONS = re.compile(r"%laneid|shfl\.|vote\.|redux\.|match\.")
NAMED_BARRIER = re.compile(r"bar(?:rier)?\.(sync|arrive)\s+\$(\d+),\s*(\d+)")


class Unsupported(NotImplementedError):
    pass


@lru_cache(maxsize=1024)
def statements(text: str) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """(guard, mnemonic, operands); a label is (name, ":", ())."""
    text = text.replace("\\0A", "\n").replace("\\09", " ").replace("\\22", '"').strip()
    text = re.sub(r"//[^\n]*", "", text)
    if text.startswith("{"):
        text = text[1 : text.rindex("}")]
    out = []
    for each in split_top(text.replace("\n", " "), ";"):
        each = each.strip()
        label = re.match(r"(\w+):\s*", each)
        if label:
            out.append((label.group(1), ":", ()))
            each = each[label.end() :]
        if not each or each.startswith((".reg", ".pragma")):
            continue
        guard = ""
        if each.startswith("@"):
            guard, each = each[1:].split(None, 1)
        mnemonic, _, rest = each.partition(" ")
        operands = tuple(one.strip() for one in split_top(rest, ",") if one.strip())
        out.append((guard, mnemonic, operands))
    return tuple(out)


class Thread:
    """All threads of a warp partition."""

    def __init__(self, inputs: dict[str, np.ndarray], shape: tuple[int, ...]) -> None:
        self.registers: dict[str, np.ndarray] = dict(inputs)
        self.shape = shape
        self.active = np.ones(shape, bool)
        self.parked: dict[str, np.ndarray] = {}

    def run(self, text: str) -> dict[str, np.ndarray]:
        for guard, mnemonic, operands in statements(text):
            if mnemonic == ":":
                self.active = self.active | self.parked.pop(guard, False)
                continue
            mask = self.active
            if guard:
                predicate = self.registers[guard.lstrip("!")]
                mask = mask & (~predicate if guard[0] == "!" else predicate)
            if mnemonic.startswith("bra"):
                self.parked[operands[0]] = self.parked.get(operands[0], False) | mask
                self.active = self.active & ~mask
            elif not mask.any() or mnemonic.startswith(
                ("griddepcontrol", "prefetch", "cp.async.bulk.prefetch")
            ):
                continue
            else:
                self.mask = mask
                self.step(mnemonic.split("."), mnemonic, operands)
        return self.registers

    # -------------------------------------------------------------- operands

    def get(self, operand: str, kind: str) -> np.ndarray:
        dtype = _VIEWS.get(kind)
        if operand == "%laneid":
            return np.broadcast_to(np.arange(32, dtype=np.uint32)[None, :, None], self.shape)
        if operand.startswith("0f"):
            return np.asarray([int(operand[2:], 16)], np.uint32).view(np.float32)[0]
        if re.match(r"-?(0x)?[0-9a-fA-F]+$", operand) and operand[0] in "-0123456789":
            value = int(operand, 0)
            bits = 64 if kind.endswith("64") else 32
            raw = np.asarray([value & ((1 << bits) - 1)], np.uint64 if bits == 64 else np.uint32)
            return raw.view(dtype or raw.dtype)[0]
        raw = self.registers[operand]
        if raw.dtype == bool or dtype is None:
            return raw
        size = np.dtype(dtype).itemsize
        if raw.dtype.itemsize != size:
            raw = raw.astype({2: np.uint16, 4: np.uint32, 8: np.uint64}[size])
        return raw.view(dtype)

    def put(self, operand: str, value: Any) -> None:
        value = np.broadcast_to(np.asarray(value), self.shape)
        if value.dtype != bool:
            value = np.ascontiguousarray(value)
            value = value.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[value.dtype.itemsize])
        if operand == "_":
            return
        if not self.mask.all() and operand in self.registers:
            value = np.where(self.mask, value, self.registers[operand])
        self.registers[operand] = value

    # -------------------------------------------------------------- instructions

    def step(self, parts: list[str], mnemonic: str, operands: tuple[str, ...]) -> None:
        name, kind, target = parts[0], parts[-1], operands[0]
        if name == "mov":
            self._move(kind, operands)
        elif name == "setp":
            self._compare(parts, operands)
        elif name == "selp":
            is_first = self.get(operands[3], "pred")
            self.put(
                target, np.where(is_first, self.get(operands[1], kind), self.get(operands[2], kind))
            )
        elif name == "shfl":
            self._shuffle(parts[2], operands)
        elif name == "vote":
            value = self.get(operands[1], "pred") & self.mask
            every = {"any": value.any(1, keepdims=True), "all": value.all(1, keepdims=True)}[
                parts[2]
            ]
            self.put(target, np.broadcast_to(every, self.shape))
        elif name == "redux":
            value = self.get(operands[1], kind)
            reduce = {"max": np.max, "min": np.min, "add": np.sum}[parts[2]]
            self.put(
                target,
                np.broadcast_to(reduce(value, 1, keepdims=True), self.shape).astype(value.dtype),
            )
        elif name == "cvt":
            self._convert(parts, operands)
        elif name == "prmt":
            self._permute(operands)
        elif kind in ("f16x2", "bf16x2"):
            self._packed(name, kind, operands)
        else:
            self._arithmetic(name, parts, kind, mnemonic, operands)

    def _arithmetic(
        self, name: str, parts: list[str], kind: str, mnemonic: str, operands: tuple[str, ...]
    ) -> None:
        values = [self.get(each, kind) for each in operands[1:]]
        with np.errstate(all="ignore"):
            if name in ("add", "sub", "mul"):
                one = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
                result = one(*values)
            elif name == "fma":
                wide = [each.astype(np.float64) for each in values]
                result = (wide[0] * wide[1] + wide[2]).astype(np.float32)
            elif name == "mad":
                result = values[0] * values[1] + values[2]
            elif name in ("max", "min"):
                pick = {"max": np.maximum, "min": np.minimum}[name]
                if kind == "f32" and "NaN" not in parts:
                    pick = {"max": np.fmax, "min": np.fmin}[name]
                result = pick(*values)
            elif name == "abs":
                result = np.abs(values[0])
            elif name == "neg":
                result = -values[0]
            elif name in ("and", "or", "xor"):
                result = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name](
                    *values
                )
            elif name in ("shl", "shr"):
                count = np.minimum(self.get(operands[2], "u32"), 31).astype(values[0].dtype)
                result = values[0] << count if name == "shl" else values[0] >> count
            elif name == "lg2":
                result = np.log2(values[0])
            elif name == "ex2":
                result = np.exp2(values[0])
            elif name == "rcp":
                result = np.float32(1) / values[0]
            else:
                raise Unsupported(f"PTX {mnemonic}")
        self.put(operands[0], np.asarray(result, _VIEWS[kind]))

    def _move(self, kind: str, operands: tuple[str, ...]) -> None:
        target, source = operands
        if target.startswith("{"):
            low, high = (each.strip() for each in target[1:-1].split(","))
            value = self.get(source, "b32")
            self.put(low, (value & 0xFFFF).astype(np.uint16))
            self.put(high, (value >> 16).astype(np.uint16))
        elif source.startswith("{"):
            low, high = (
                self.get(each.strip(), "b16").astype(np.uint32) for each in source[1:-1].split(",")
            )
            self.put(target, low | (high << 16))
        else:
            self.put(target, self.get(source, kind))

    def _compare(self, parts: list[str], operands: tuple[str, ...]) -> None:
        kind = parts[-1]
        a, b = self.get(operands[1], kind), self.get(operands[2], kind)
        compare = {
            "eq": np.equal,
            "ne": np.not_equal,
            "neu": np.not_equal,
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
        }[parts[1]]
        result = compare(a, b)
        if parts[1] == "ne" and kind == "f32":
            result = result & ~np.isnan(a) & ~np.isnan(b)
        if len(parts) == 4:
            other = self.get(operands[3], "pred")
            result = {"or": np.logical_or, "and": np.logical_and}[parts[2]](result, other)
        self.put(operands[0], np.broadcast_to(result, self.shape))

    def _shuffle(self, mode: str, operands: tuple[str, ...]) -> None:
        value = self.get(operands[1], "b32")
        lane = np.arange(32)
        by = int(operands[2], 0)
        control = int(operands[3], 0)
        segment = (control >> 8) & 31  # bits of the lane that stay
        if mode == "bfly":
            source = lane ^ by
        elif mode == "idx":
            source = (lane & segment) | (by & ~segment & 31)
        else:
            raise Unsupported(f"shfl.{mode}")
        self.put(operands[0], np.ascontiguousarray(value[:, source]))

    def _convert(self, parts: list[str], operands: tuple[str, ...]) -> None:
        to, source = parts[-2], parts[-1]
        if (to, source) == ("f16x2", "e4m3x2"):
            value = self.get(operands[1], "b16")
            low = encode(E4M3[value & 0xFF], "f16").astype(np.uint32)
            high = encode(E4M3[value >> 8], "f16").astype(np.uint32)
            self.put(operands[0], low | (high << 16))
        elif (to, source) == ("e4m3x2", "f32"):
            high, low = (
                encode(self.get(each, "f32"), "f8E4M3FN").astype(np.uint16) for each in operands[1:]
            )
            self.put(operands[0], low | (high << 8))
        elif to in ("f16x2", "bf16x2") and source == "f32":
            high, low = (
                encode(np.broadcast_to(self.get(each, "f32"), self.shape), to[:-2]).astype(
                    np.uint32
                )
                for each in operands[1:]
            )
            self.put(operands[0], low | (high << 16))
        elif (to, source) == ("f16", "f32"):
            self.put(operands[0], encode(self.get(operands[1], "f32"), "f16"))
        elif (to, source) == ("f32", "f16"):
            self.put(operands[0], decode(self.get(operands[1], "b16"), "f16"))
        elif to in _VIEWS and source in _VIEWS:
            self.put(operands[0], self.get(operands[1], source).astype(_VIEWS[to]))
        else:
            raise Unsupported(f"PTX {'.'.join(parts)}")

    def _permute(self, operands: tuple[str, ...]) -> None:
        both = self.get(operands[1], "b32").astype(np.uint64) | (
            np.asarray(self.get(operands[2], "b32")).astype(np.uint64) << np.uint64(32)
        )
        selector, result = int(operands[3], 0), np.zeros(self.shape, np.uint64)
        for i in range(4):
            pick = np.uint64((selector >> (4 * i)) & 7)
            result = result | (
                ((both >> (pick * np.uint64(8))) & np.uint64(255)) << np.uint64(8 * i)
            )
        self.put(operands[0], result.astype(np.uint32))

    def _packed(self, name: str, kind: str, operands: tuple[str, ...]) -> None:
        halves = []
        for shift in (0, 16):
            values = [
                decode(
                    ((self.get(each, "b32") >> np.uint32(shift)) & np.uint32(0xFFFF)).astype(
                        np.uint16
                    ),
                    kind[:-2],
                )
                for each in operands[1:]
            ]
            with np.errstate(all="ignore"):
                if name == "mul":
                    result = values[0] * values[1]
                elif name == "add":
                    result = values[0] + values[1]
                elif name == "fma":
                    wide = [each.astype(np.float64) for each in values]
                    result = (wide[0] * wide[1] + wide[2]).astype(np.float32)
                else:
                    raise Unsupported(f"PTX {name}.{kind}")
            halves.append(encode(result, kind[:-2]).astype(np.uint32))
        self.put(operands[0], halves[0] | (halves[1] << 16))
