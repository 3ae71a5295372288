"""Operations -> Python: a generator per function and per warp partition.

Structured control flow becomes Python's own. A value is a variable; generated code yields where
another partition or an engine may run (`machine`).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mlakit.tools.emulator import dtypes, runtime
from mlakit.tools.emulator.ir import Function, Module, Op, Region
from mlakit.tools.emulator.types import Type, Types

INT_BINARY = {
    "arith.addi": "+",
    "arith.subi": "-",
    "arith.muli": "*",
    "arith.andi": "&",
    "arith.ori": "|",
    "arith.xori": "^",
}
FLOAT_BINARY = {"arith.addf": "+", "arith.subf": "-", "arith.mulf": "*", "arith.divf": "/"}
PICKS = {
    "arith.maxsi": "np.maximum",
    "arith.minsi": "np.minimum",
    "arith.maxnumf": "np.fmax",
    "arith.minnumf": "np.fmin",
    "arith.maximumf": "np.maximum",
    "arith.minimumf": "np.minimum",
}
COMPARE = {
    "eq": "==",
    "ne": "!=",
    "slt": "<",
    "sle": "<=",
    "sgt": ">",
    "sge": ">=",
    "ult": "<",
    "ule": "<=",
    "ugt": ">",
    "uge": ">=",
    "oeq": "==",
    "ogt": ">",
    "oge": ">=",
    "olt": "<",
    "ole": "<=",
    "une": "!=",
}
MATH = {
    "math.exp2": "np.exp2",
    "math.log2": "np.log2",
    "math.exp": "np.exp",
    "math.log": "np.log",
    "math.absf": "np.abs",
    "math.sqrt": "np.sqrt",
    "math.floor": "np.floor",
    "math.ceil": "np.ceil",
    "math.absi": "np.abs",
}
IGNORED = {
    "tt.grid_dependency_wait",
    "tt.grid_dependency_launch_dependents",
    "ttg.local_dealloc",
    "ttg.barrier",
    "gpu.barrier",
    "ttng.inval_barrier",
    "tt.assert",
    "ttg.warp_yield",
    "ttg.warp_return",
    "tt.print",
    "llvm.intr.assume",
    "ttng.fence_mbarrier_init_release_cluster",
}
SYNC = ("ttng.", "ttg.async", "ttg.local", "tt.load", "tt.store", "tt.elementwise", "tt.atomic")


class Unsupported(NotImplementedError):
    pass


class Emitter:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.types = Types(module.attributes)
        self.lines: list[str] = []
        self.depth = 0
        self.names: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.by_value: dict[str, str] = {}
        self.functions: dict[str, str] = {}
        self.forces_tensors = False  # in the combination of a reduction
        self.used: dict[str, int] = {}

    # -------------------------------------------------------------- text

    def write(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)

    def name(self, value: str) -> str:
        if value not in self.names:
            self.names[value] = f"v{len(self.names)}"
        return self.names[value]

    def of(self, op: Op) -> list[str]:
        return [self.name(each) for each in op.operands]

    def constant(self, value: Any, key: str) -> str:
        if key not in self.by_value:
            self.by_value[key] = f"c{len(self.constants)}"
            self.constants[self.by_value[key]] = value
        return self.by_value[key]

    def type(self, text: str) -> Type:
        return self.types.parse(text)

    def type_constant(self, type: Type) -> str:
        return self.constant(type, f"type {type}")

    # -------------------------------------------------------------- functions

    def module_source(self) -> str:
        for i, function in enumerate(self.module.functions.values()):
            self.functions[function.name] = f"f{i}"
        for function in self.module.functions.values():
            self.function(function)
        return "\n".join(self.lines)

    def function(self, function: Function) -> None:
        self.names = {}
        args = ", ".join(self.name(name) for name, _ in function.args)
        self.write(f"def {self.functions[function.name]}(rt, p{', ' if args else ''}{args}):")
        self.depth += 1
        self.write("if False: yield")
        self.region(function.body, [])
        self.depth -= 1

    def region(self, region: Region, targets: list[str]) -> None:
        """Operations; what it yields goes to `targets`."""
        self.depth += 0
        before = len(self.lines)
        for op in region.ops:
            self.op(op, targets)
        if len(self.lines) == before:
            self.write("pass")

    def assign(self, targets: list[str], values: list[str]) -> None:
        if targets:
            self.write(f"{', '.join(targets)} = {', '.join(values)}")

    # -------------------------------------------------------------- operations

    def op(self, op: Op, targets: list[str]) -> None:
        self.used[op.name] = self.used.get(op.name, 0) + 1
        name = op.name
        if name in IGNORED:
            return
        if name in ("scf.yield", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return"):
            self.assign(targets, self.of(op))
            return
        if name.startswith(SYNC):
            self.write(f"p.where = {f'{self.module.where(op.location)} ({name})'!r}")
        handler = getattr(self, "do_" + name.replace(".", "_"), None)
        if handler is not None:
            handler(op)
            return
        expression = self.expression(op)
        if op.results:
            self.write(f"{self.name(op.results[0])} = {expression}")
        else:
            self.write(expression)

    def expression(self, op: Op) -> str:
        name, values = op.name, self.of(op)
        text = op.types
        if name in INT_BINARY:
            kind, is_tensor = self.kind(text)
            plain = f"{values[0]} {INT_BINARY[name]} {values[1]}"
            if is_tensor or kind == "i1" or name in ("arith.andi", "arith.ori", "arith.xori"):
                return plain
            return f"wrap({plain}, {dtypes.BITS[kind]})"
        if name in FLOAT_BINARY:
            kind, is_tensor = self.kind(text)
            return self.rounded(f"{values[0]} {FLOAT_BINARY[name]} {values[1]}", kind)
        if name in PICKS:
            kind, is_tensor = self.kind(text)
            if is_tensor or kind[0] != "i":
                return f"{PICKS[name]}({values[0]}, {values[1]})"
            return f"{'max' if 'max' in name else 'min'}({values[0]}, {values[1]})"
        if name in ("arith.maxui", "arith.minui", "arith.divui", "arith.remui", "arith.shrui"):
            kind, is_tensor = self.kind(text)
            a, b = (f"unsigned({each}, {kind!r})" for each in values)
            inner = {
                "arith.maxui": f"np.maximum({a}, {b})",
                "arith.minui": f"np.minimum({a}, {b})",
                "arith.divui": f"{a} // {b}",
                "arith.remui": f"{a} % {b}",
                "arith.shrui": f"{a} >> {b}",
            }[name]
            return f"signed({inner}, {kind!r})"
        if name in ("arith.divsi", "arith.remsi"):
            return f"{'trunc_div' if 'div' in name else 'trunc_rem'}({values[0]}, {values[1]})"
        if name in ("arith.shli", "arith.shrsi"):
            kind, is_tensor = self.kind(text)
            plain = f"{values[0]} {'<<' if 'shli' in name else '>>'} {values[1]}"
            return plain if is_tensor else f"wrap({plain}, {dtypes.BITS[kind]})"
        if name in ("arith.cmpi", "arith.cmpf"):
            predicate = op.text.split(",")[0].strip()
            kind, is_tensor = self.kind(text)
            if predicate[0] == "u" and predicate != "une":
                values = [f"unsigned({each}, {kind!r})" for each in values]
            plain = f"{values[0]} {COMPARE[predicate]} {values[1]}"
            return plain if is_tensor else f"bool({plain})"
        if name == "arith.select":
            condition = self.type(op.operand_types()[0])
            if condition.is_tensor or self.forces_tensors:
                return f"np.where({values[0]}, {values[1]}, {values[2]})"
            return f"{values[1]} if {values[0]} else {values[2]}"
        if name in MATH:
            kind, _ = self.kind(text)
            return self.rounded(f"{MATH[name]}({values[0]})", kind)
        if name == "math.fma":
            return f"fma({', '.join(values)})"
        if name == "math.rsqrt":
            return f"np.float32(1) / np.sqrt({values[0]})"
        if name == "arith.negf":
            return f"-{values[0]}"
        if name in (
            "arith.extsi",
            "arith.trunci",
            "arith.extui",
            "arith.sitofp",
            "arith.fptosi",
            "arith.index_cast",
            "arith.uitofp",
        ):
            return self.cast(op, values[0])
        if name in ("arith.extf", "arith.truncf", "tt.fp_to_fp"):
            return self.rounded(values[0], self.type(op.result_type).kind)
        if name in ("tt.bitcast", "arith.bitcast"):
            source, target = (self.type(each) for each in (op.types.split("->")[0], op.result_type))
            return f"bitcast({values[0]}, {source.kind!r}, {target.kind!r}, {target.is_tensor})"
        if self.forces_tensors and name in (
            "tt.splat",
            "tt.unsplat",
            "tt.reshape",
            "tt.expand_dims",
            "tt.trans",
            "tt.broadcast",
        ):
            return self.trailing(op, values[0])
        if name == "tt.splat":
            type = self.type(op.result_type)
            return f"np.full({type.shape}, {values[0]}, np.{np.dtype(dtypes.value_dtype(type.kind)).name})"
        if name == "tt.unsplat":
            return f"scalar({values[0]}.reshape(-1)[0], {self.type(op.result_type).kind!r})"
        if name == "tt.broadcast":
            return f"np.broadcast_to({values[0]}, {self.type(op.result_type).shape})"
        if name == "tt.expand_dims":
            return f"np.expand_dims({values[0]}, {op.int_attr('axis')})"
        if name == "tt.reshape":
            return f"np.reshape({values[0]}, {self.type(op.result_type).shape})"
        if name == "tt.trans":
            return f"np.transpose({values[0]}, {op.array_attr('order')})"
        if name == "tt.join":
            return f"np.stack([{values[0]}, {values[1]}], -1)"
        if name == "tt.cat":
            return f"np.concatenate([{values[0]}, {values[1]}])"
        if name == "ttg.convert_layout":
            types = [
                self.type_constant(self.type(each))
                for each in (op.types.split("->")[0], op.result_type)
            ]
            return f"rt.convert({values[0]}, {types[0]}, {types[1]}, p.num_warps)"
        if name in ("tt.ptr_to_int", "tt.int_to_ptr", "gluon.set_auto_layout"):
            return values[0]
        if name == "tt.make_range":
            return self.constant(
                np.arange(op.int_attr("start"), op.int_attr("end"), dtype=np.int32),
                f"range {op.int_attr('start')} {op.int_attr('end')}",
            )
        if name == "tt.addptr":
            return f"{values[0]} + {self.pointer_step(op, values[1])}"
        if name in ("tt.get_program_id", "tt.get_num_programs"):
            axis = "xyz".index(op.text.strip()[0])
            return f"rt.machine.{'program' if 'program_id' in name else 'grid'}[{axis}]"
        if name == "ub.poison":
            return "None"
        raise Unsupported(f"{name}: {self.module.lines[op.line].strip()[:200]}")

    def trailing(self, op: Op, value: str) -> str:
        """Shapes in the combination of a reduction: of the last dimensions, others are elements."""
        source, target = self.type(op.types.split("->")[0]), self.type(op.result_type)
        rank = len(source.shape or ())
        if op.name == "tt.trans":
            order = [each - rank for each in op.array_attr("order")]
            return f"transpose_last({value}, {order})"
        shape = () if op.name == "tt.unsplat" else target.shape
        return f"reshape_last({value}, {rank}, {shape}, {op.name in ('tt.splat', 'tt.broadcast')})"

    def kind(self, text: str) -> tuple[str, bool]:
        type = self.type(text)
        return type.kind, type.is_tensor or self.forces_tensors

    def rounded(self, expression: str, kind: str) -> str:
        return f"rounded({expression}, {kind!r})" if kind in dtypes.NARROW else expression

    def cast(self, op: Op, value: str) -> str:
        source, target = self.type(op.types.split(" to ")[0]), self.type(op.result_type)
        if target.is_tensor or self.forces_tensors:
            if op.name == "arith.extui" and source.kind != "i1":
                value = f"unsigned({value}, {source.kind!r})"
            return f"astype({value}, np.{np.dtype(dtypes.value_dtype(target.kind)).name})"
        if target.kind[0] != "i":
            return f"np.float32({value})"
        if op.name == "arith.extui":
            return (
                f"int(unsigned({value}, {source.kind!r}))"
                if source.kind != "i1"
                else f"int({value})"
            )
        if target.kind == "i1":
            return f"bool(int({value}) & 1)"
        return f"wrap({value}, {dtypes.BITS[target.kind]})"

    def pointer_step(self, op: Op, offset: str) -> str:
        type = self.type(op.operand_types()[0])
        size = dtypes.element_size(type.pointee)
        if type.is_tensor:
            return f"{offset}.astype(np.int64) * {size}"
        return f"{offset} * {size}"

    # -------------------------------------------------------------- constants and control flow

    def do_arith_constant(self, op: Op) -> None:
        text = op.text.strip()
        if text in ("true", "false"):
            self.write(f"{self.name(op.results[0])} = {text == 'true'}")
            return
        type = self.type(op.types)
        found = re.match(r"(?:\{[^}]*\}\s*)?(?:dense<(.*)>|(\S+))$", text)
        assert found, text
        literal = found.group(1) if found.group(1) is not None else found.group(2)
        value = _number(literal, type.kind)
        if type.is_tensor:
            array = np.full(type.shape, value, dtypes.value_dtype(type.kind))
            array.setflags(write=False)
            name = self.constant(array, f"dense {literal} {type.kind} {type.shape}")
            self.write(f"{self.name(op.results[0])} = {name}")
        elif type.kind[0] == "i":
            self.write(f"{self.name(op.results[0])} = {int(value)}")
        else:
            name = self.constant(np.float32(value), f"float {literal} {type.kind}")
            self.write(f"{self.name(op.results[0])} = {name}")

    def do_scf_for(self, op: Op) -> None:
        low, high, step = self.of(op)
        args = [self.name(name) for name, _ in op.inits]
        self.assign(args, [self.name(value) for _, value in op.inits])
        induction = self.name(op.regions[0].args[0])
        self.write(f"for {induction} in range({low}, {high}, {step}):")
        self.depth += 1
        self.region(op.regions[0], args)
        self.depth -= 1
        self.assign([self.name(each) for each in op.results], args)

    def do_scf_while(self, op: Op) -> None:
        args = [self.name(name) for name, _ in op.inits]
        self.assign(args, [self.name(value) for _, value in op.inits])
        before, after = op.regions
        inner = [self.name(each) for each in after.args]
        self.write("while True:")
        self.depth += 1
        for each in before.ops:
            if each.name == "scf.condition":
                condition, *passed = self.of(each)
                self.assign(inner, passed)
                self.write(f"if not {condition}: break")
            else:
                self.op(each, [])
        self.region(after, args)
        self.depth -= 1
        self.assign([self.name(each) for each in op.results], inner)

    def do_scf_if(self, op: Op) -> None:
        results = [self.name(each) for each in op.results]
        self.write(f"if {self.of(op)[0]}:")
        self.depth += 1
        self.region(op.regions[0], results)
        self.depth -= 1
        if len(op.regions) > 1:
            self.write("else:")
            self.depth += 1
            self.region(op.regions[1], results)
            self.depth -= 1

    def do_tt_call(self, op: Op) -> None:
        found = re.match(r'\s*@("[^"]*"|[\w.$]+)\((.*)\)', op.text)
        assert found
        function = self.functions[found.group(1).strip('"')]
        args = "".join(f", {self.name(each)}" for each in re.findall(r"%[^\s,)]+", found.group(2)))
        results = [self.name(each) for each in op.results]
        self.write(
            (f"{', '.join(results)} = " if results else "") + f"yield from {function}(rt, p{args})"
        )

    def do_tt_return(self, op: Op) -> None:
        self.write(f"return {', '.join(self.of(op))}")

    def do_ttg_warp_specialize(self, op: Op) -> None:
        default, *others = op.regions
        captured = self.of(op)
        names = []
        for i, region in enumerate(others):
            name = f"w{op.line}_{i}"
            names.append(name)
            args = [self.name(each) for each in region.args]
            self.write(f"def {name}(p{''.join(', ' + each for each in args)}):")
            self.depth += 1
            self.write("if False: yield")
            self.region(region, [])
            self.depth -= 1
        bodies = ", ".join(
            f"lambda p: {name}(p{''.join(', ' + each for each in captured)})" for name in names
        )
        warps = [region.num_warps for region in others]
        self.write(f"workers = rt.fork(p, [{bodies}], {warps})")
        self.region(default, [])
        self.write("yield from rt.join(p, workers)")

    def _combine(self, op: Op) -> str:
        """The combination as a function of arrays."""
        region, name = op.regions[0], f"combine{op.line}"
        args = [self.name(each) for each in region.args]
        self.write(f"def {name}({', '.join(args)}):")
        self.depth += 1
        self.forces_tensors = True
        results = [f"r{i}" for i in range(len(args) // 2)]
        self.region(region, results)
        self.write(f"return {', '.join(results)},")
        self.forces_tensors = False
        self.depth -= 1
        return name

    def do_tt_reduce(self, op: Op) -> None:
        combine = self._combine(op)
        values = ", ".join(f"value({each})" for each in self.of(op))
        self.write(f"out = reduce(({values},), {op.int_attr('axis')}, {combine})")
        types = [self.type(each) for each in _result_types(op)]
        for i, (result, type) in enumerate(zip(op.results, types, strict=True)):
            each = f"out[{i}]" if type.is_tensor else f"scalar(out[{i}], {type.kind!r})"
            self.write(f"{self.name(result)} = {each}")

    def do_tt_scan(self, op: Op) -> None:
        combine = self._combine(op)
        is_reverse = op.attr("reverse", "false") == "true"
        self.write(
            f"out = scan(({', '.join(self.of(op))},), {op.int_attr('axis')}, {is_reverse}, {combine})"
        )
        for i, result in enumerate(op.results):
            self.write(f"{self.name(result)} = out[{i}]")

    def do_tt_split(self, op: Op) -> None:
        source = self.of(op)[0]
        self.write(f"{self.name(op.results[0])} = {source}[..., 0]")
        self.write(f"{self.name(op.results[1])} = {source}[..., 1]")

    # -------------------------------------------------------------- memory

    def do_tt_load(self, op: Op) -> None:
        pointer, *rest = self.of(op)
        mask, other = (rest + ["None", "None"])[:2]
        kind = self.type(op.operand_types()[0]).pointee
        self.write(f"{self.name(op.results[0])} = rt.load({pointer}, {mask}, {other}, {kind!r})")

    def do_tt_store(self, op: Op) -> None:
        pointer, value, *rest = self.of(op)
        kind = self.type(op.operand_types()[0]).pointee
        self.write(f"rt.store({pointer}, {value}, {(rest or ['None'])[0]}, {kind!r})")

    def do_tt_atomic_rmw(self, op: Op) -> None:
        operation = op.text.strip().split(",")[0]
        pointer, value, *rest = self.of(op)
        kind = self.type(op.result_type).kind
        self.write("yield")
        self.write(
            f"{self.name(op.results[0])} = rt.atomic({operation!r}, {pointer}, {value}, {(rest or ['None'])[0]}, {kind!r})"
        )

    def do_ttg_local_alloc(self, op: Op) -> None:
        type = self.type_constant(self.type(op.result_type))
        value = (self.of(op) or ["None"])[0]
        self.write(
            f"{self.name(op.results[0])} = rt.allocate(p, {type}, {op.results[0][1:]!r}, {value})"
        )

    def do_ttg_memdesc_index(self, op: Op) -> None:
        tile, at = self.of(op)
        self.write(
            f"{self.name(op.results[0])} = rt.index({tile}, {at}, {self.type_constant(self.type(op.result_type))})"
        )

    def do_ttg_memdesc_subslice(self, op: Op) -> None:
        at = [int(each) for each in re.findall(r"-?\d+", op.text[op.text.index("[") :])]
        self.write(
            f"{self.name(op.results[0])} = rt.subslice({self.of(op)[0]}, {at}, {self.type_constant(self.type(op.result_type))})"
        )

    def do_ttg_memdesc_trans(self, op: Op) -> None:
        self.write(
            f"{self.name(op.results[0])} = rt.transpose({self.of(op)[0]}, {op.array_attr('order')}, {self.type_constant(self.type(op.result_type))})"
        )

    def do_ttg_memdesc_reinterpret(self, op: Op) -> None:
        self.write(
            f"{self.name(op.results[0])} = rt.reinterpret({self.of(op)[0]}, {self.type_constant(self.type(op.result_type))})"
        )

    do_ttg_memdesc_reshape = do_ttg_memdesc_reinterpret

    def do_ttg_local_load(self, op: Op) -> None:
        self.write(f"{self.name(op.results[0])} = yield from rt.local_load(p, {self.of(op)[0]})")

    def do_ttg_local_store(self, op: Op) -> None:
        value, tile = self.of(op)[:2]
        self.write(f"yield from rt.local_store(p, {value}, {tile})")

    # -------------------------------------------------------------- barriers

    def do_ttng_init_barrier(self, op: Op) -> None:
        count = int(re.search(r",\s*(\d+)", op.text).group(1))
        self.write(f"rt.init_barrier(p, {self.of(op)[0]}, {count})")

    def do_ttng_arrive_barrier(self, op: Op) -> None:
        count = int(re.search(r",\s*(\d+)", op.text).group(1))
        tile, *rest = self.of(op)
        self.write(f"yield from rt.arrive(p, {tile}, {count}, {(rest or ['True'])[0]})")

    def do_ttng_barrier_expect(self, op: Op) -> None:
        size = int(re.search(r",\s*(\d+)", op.text).group(1))
        tile, *rest = self.of(op)
        self.write(f"yield from rt.expect(p, {tile}, {size}, {(rest or ['True'])[0]})")

    def do_ttng_wait_barrier(self, op: Op) -> None:
        before = re.findall(r"%[\w.$-]+(?:#\d+)?", re.split(r"\bdeps\b", op.text)[0])
        tile, phase, *rest = (self.name(each) for each in before)
        self.write(f"yield from rt.wait(p, {tile}, {phase}, {(rest or ['True'])[0]})")

    def do_ttng_fence_async_shared(self, op: Op) -> None:
        self.write("rt.fence(p)")

    # -------------------------------------------------------------- asynchronous operations

    def _copy_operands(self, op: Op) -> tuple[str, str, list[str]]:
        found = re.match(r"\s*(%[^\s\[]+)\[([^\]]*)\]\s*(.*)$", op.text)
        assert found, op.text
        at = ", ".join(self.name(each.strip()) for each in found.group(2).split(","))
        rest = [self.name(each) for each in re.findall(r"%[\w.$-]+(?:#\d+)?", found.group(3))]
        return self.name(found.group(1)), at, rest

    def do_ttng_async_tma_copy_global_to_local(self, op: Op) -> None:
        descriptor, at, (tile, barrier, *rest) = self._copy_operands(op)
        self.write(
            f"yield from rt.tma_load(p, {descriptor}, [{at}], {tile}, {barrier}, {(rest or ['True'])[0]})"
        )

    def do_ttng_async_tma_gather(self, op: Op) -> None:
        descriptor, at, (tile, barrier, *rest) = self._copy_operands(op)
        rows, column = (each.strip() for each in at.split(","))
        self.write(
            f"yield from rt.tma_load(p, {descriptor}, [0, {column}], {tile}, {barrier}, {(rest or ['True'])[0]}, {rows})"
        )

    def do_ttng_async_tma_copy_local_to_global(self, op: Op) -> None:
        descriptor, at, (tile, *_) = self._copy_operands(op)
        self.write(f"yield from rt.tma_store(p, {descriptor}, [{at}], {tile})")

    def do_ttng_async_tma_store_wait(self, op: Op) -> None:
        self.write(f"yield from rt.drain(p, p.stores, {op.int_attr('pendings')})")

    def do_ttg_async_copy_global_to_local(self, op: Op) -> None:
        pointer, tile, *_ = self.of(op)
        named = {
            key: self.name(each)
            for key, each in re.findall(r"(mask|other) (%[\w.$-]+(?:#\d+)?)", op.text)
        }
        self.write(
            f"yield from rt.copy_async(p, {pointer}, {tile}, {named.get('mask')}, {named.get('other')})"
        )
        self.write(f"{self.name(op.results[0])} = None")

    def do_ttng_async_copy_mbarrier_arrive(self, op: Op) -> None:
        self.write(f"yield from rt.copy_arrive(p, {self.of(op)[0]})")

    def do_ttg_async_commit_group(self, op: Op) -> None:
        self.write("rt.commit_group(p)")
        self.assign([self.name(each) for each in op.results], ["None"])

    def do_ttg_async_wait(self, op: Op) -> None:
        self.write(f"yield from rt.wait_groups(p, {op.int_attr('num')})")
        self.assign([self.name(each) for each in op.results], ["None"])

    def do_ttng_warp_group_dot(self, op: Op) -> None:
        a, b, c, *rest = self.of(op)
        is_async = op.attr("isAsync", "false") == "true"
        self.write(
            f"{self.name(op.results[0])} = yield from rt.dot(p, {a}, {b}, {c}, {(rest or ['True'])[0]}, {is_async})"
        )

    def do_ttng_warp_group_dot_wait(self, op: Op) -> None:
        results = [self.name(each) for each in op.results]
        self.write(
            f"{', '.join(results)}, = yield from rt.dot_wait(p, [{', '.join(self.of(op))}], {op.int_attr('pendings')})"
        )

    def do_tt_dot(self, op: Op) -> None:
        a, b, c = self.of(op)[:3]
        self.write(
            f"{self.name(op.results[0])} = {a}.astype(np.float32) @ {b}.astype(np.float32) + {c}"
        )

    # -------------------------------------------------------------- tcgen05

    def do_ttng_tmem_alloc(self, op: Op) -> None:
        type = self.type_constant(self.type(_result_types(op)[0]))
        value = (self.of(op) or ["None"])[0]
        self.write(
            f"{self.name(op.results[0])} = rt.allocate_tensor_memory(p, {type}, {op.results[0][1:]!r}, {value})"
        )
        self.assign([self.name(each) for each in op.results[1:]], ["None"] * (len(op.results) - 1))

    def do_ttng_tmem_load(self, op: Op) -> None:
        if op.attr("redOp") is not None:
            raise Unsupported("tmem_load with a reduction")
        self.write(f"{self.name(op.results[0])} = yield from rt.tmem_load(p, {self.of(op)[0]})")
        self.assign([self.name(each) for each in op.results[1:]], ["None"] * (len(op.results) - 1))

    def do_ttng_tmem_store(self, op: Op) -> None:
        value, tile, *rest = self.of(op)
        self.write(f"yield from rt.tmem_store(p, {value}, {tile}, {(rest or ['True'])[-1]})")
        self.assign([self.name(each) for each in op.results], ["None"] * len(op.results))

    def do_ttng_tmem_subslice(self, op: Op) -> None:
        offset = op.int_attr("offset") if op.attr("offset") else op.int_attr("N")
        self.write(
            f"{self.name(op.results[0])} = rt.subslice({self.of(op)[0]}, [0, {offset}], {self.type_constant(self.type(op.result_type))})"
        )

    def do_ttng_tc_gen5_mma(self, op: Op) -> None:
        found = re.match(
            r"\s*(%\S+), (%\S+), (%[^\s\[]+)\[[^\]]*\], (%\S+), (%[^\s,]+)(.*)$", op.text
        )
        assert found, op.text
        a, b, d, uses_d, is_asked = (self.name(each.rstrip(",")) for each in found.groups()[:5])
        barriers = re.findall(r"(%[^\s\[,]+)\[(%[^\s\],]+)\]", found.group(6))
        pairs = ", ".join(f"({self.name(one)}, {self.name(other)})" for one, other in barriers)
        of_a = self.type(op.operand_types()[0])
        self.write(
            f"yield from rt.mma(p, {a}, {b}, {d}, {uses_d}, {is_asked}, [{pairs}], {'tensor_memory' in of_a.space})"
        )
        self.assign([self.name(each) for each in op.results], ["None"] * len(op.results))

    def do_ttng_tc_gen5_commit(self, op: Op) -> None:
        before = [
            self.name(each) for each in re.findall(r"%[\w.$-]+(?:#\d+)?", op.text.split("descs")[0])
        ]
        guard = f"if {before[1]}: " if len(before) > 1 else ""
        self.write("yield")
        self.write(f"{guard}rt.commit(p, {before[0]})")

    def do_ttng_tmem_copy(self, op: Op) -> None:
        source, target = self.of(op)[:2]
        self.write(f"yield from rt.copy_to_tensor_memory(p, {source}, {target})")

    def do_ttng_packed_arith(self, op: Op) -> None:
        operation, values = op.text.split()[0], self.of(op)
        inner = {
            "add": "{0} + {1}",
            "sub": "{0} - {1}",
            "mul": "{0} * {1}",
            "fma": "fma({0}, {1}, {2})",
            "min": "np.fmin({0}, {1})",
            "max": "np.fmax({0}, {1})",
        }[operation].format(*values)
        self.write(
            f"{self.name(op.results[0])} = {self.rounded(inner, self.type(op.result_type).kind)}"
        )

    def do_tt_map_elementwise(self, op: Op) -> None:
        if op.int_attr("pack") != 1:
            raise Unsupported("map_elementwise of several elements")
        region, name = op.regions[0], f"combine{op.line}"
        self.write(f"def {name}({', '.join(self.name(each) for each in region.args)}):")
        self.depth += 1
        self.forces_tensors = True
        results = [f"r{i}" for i in range(len(op.results))]
        self.region(region, results)
        self.write(f"return {', '.join(results)},")
        self.forces_tensors = False
        self.depth -= 1
        results = ", ".join(self.name(each) for each in op.results)
        self.write(f"{results}, = {name}({', '.join(self.of(op))})")

    # -------------------------------------------------------------- inline assembly

    def do_tt_elementwise_inline_asm(self, op: Op) -> None:
        found = re.match(r'\s*"((?:[^"\\]|\\.)*)"\s*\{(.*?)\}\s*(.*)$', op.text)
        assert found, op.text[:200]
        text = found.group(1)
        constraints = re.search(r'constraints = "([^"]*)"', found.group(2)).group(1)
        pack = int(re.search(r"packed_element = (\d+)", found.group(2)).group(1))
        values = [self.name(each) for each in re.findall(r"%[\w.$-]+(?:#\d+)?", found.group(3))]
        results = [self.name(each) for each in op.results]
        named = runtime.ptx.NAMED_BARRIER.search(text)
        if named:  # `primitives.named_wait`: $1 is the number, $2 whether it is asked for
            number = values[int(named.group(2)) - 1]
            is_asked = values[1] if "setp" in text else "True"
            self.write(
                f"yield from rt.named(p, {named.group(1)!r}, {number}, {named.group(3)}, {is_asked})"
            )
            self.assign(results, ["0"] * len(results))
            return
        types = [self.type(each) for each in op.operand_types()] if values else []
        outs = [
            self.type(each)
            for each in (
                _result_types(op) if values else found.group(3).replace("->", "").split(",")
            )
        ]
        key = self.constant(text, f"asm {text}")
        kinds = self.constant((types, outs), f"asm types {types} {outs}")
        self.write(
            f"{', '.join(results)} = rt.asm(p, {key}, {constraints!r}, {pack}, [{', '.join(values)}], *{kinds})"
        )


def _result_types(op: Op) -> list[str]:
    from mlakit.tools.emulator.scanning import split_top

    text = op.types.split("->", 1)[1].strip() if "->" in op.types else op.types
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return [each.strip() for each in split_top(text, ",")]


def _number(literal: str, kind: str) -> Any:
    if literal in ("true", "false"):
        return literal == "true"
    if kind[0] == "i":
        return int(literal, 0)
    if literal.startswith("0x"):
        bits = np.asarray([int(literal, 16)], np.uint64)
        return dtypes.from_bits(bits, kind)[0]
    return float(literal)


def value(x: Any) -> Any:
    """A value that may be used."""
    if isinstance(x, runtime.AsyncTensor):
        x.used()
    return x


def compile_module(module: Module) -> tuple[Any, Emitter, str]:
    """(the kernel as a generator function, the emitter, the source)."""
    emitter = Emitter(module)
    source = emitter.module_source()
    scope: dict[str, Any] = {
        "np": np,
        "value": value,
        "rounded": dtypes.rounded,
        **emitter.constants,
    }
    for each in (
        "wrap",
        "trunc_div",
        "trunc_rem",
        "unsigned",
        "signed",
        "scalar",
        "bitcast",
        "reduce",
        "scan",
        "astype",
        "fma",
        "reshape_last",
        "transpose_last",
    ):
        scope[each] = getattr(runtime, each)
    exec(compile(source, f"<{module.kernel.name}>", "exec"), scope)
    return scope[emitter.functions[module.kernel.name]], emitter, source
