"""Measures the SM clock and the cycles of a CTA during `m64_bf16` decodes.

    python scripts/sm_clock.py                      random rows, as in `mlakit bench decode`
    python scripts/sm_clock.py --rows zeros         a cache and queries of zeros
    python scripts/sm_clock.py --rows halved        a CTA loads only half of each row
    python scripts/sm_clock.py --rows absent        a CTA loads nothing; both give wrong results
    python scripts/sm_clock.py --checkout FOLDER    the kernel of another checkout; use its own
                                                    script if its kernel differs
    python scripts/sm_clock.py --rest 50            wait 50 milliseconds before each call

Copies the package and patches `m64_bf16` in the copy: every CTA writes the SM clock and the global
timer at its start and end. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import sleep

from rich.console import Console
from rich.table import Table

SHAPES = ("128q1s4k", "128q2s4k", "64q1s16k", "1q1s64k")
HEADS = 128
CALLS = 40
ADDRESS = "MLAKIT_CLOCKS"  # of the buffer that CTAs write to: four numbers each
KERNEL = "mlakit/kernels/hopper/decode/m64_bf16.py"
LOADS_FILE = "mlakit/kernels/hopper/decode/m64_bf16_loads.py"
WRITE = f'''import os

CLOCKS = gl.constexpr(int(os.environ["{ADDRESS}"]))


@gluon.jit
def _write_clocks(FIRST: gl.constexpr):
    """The SM clock in cycles and the global timer in nanoseconds."""
    cycles = gl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1
    )
    time = gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1
    )
    program = gl.program_id(0) + gl.num_programs(0) * gl.program_id(1)
    at = (4 * program + FIRST).to(gl.int64) * 8 + CLOCKS
    at = at.to(gl.pointer_type(gl.int64), bitcast=True)
    gl.store(at, cycles)
    gl.store(at + 1, time)


'''
FIRST_FUNCTION = "@gluon.jit\ndef _add_qk("
BEGIN = """    token, first_head, rows, next_rows = lookup_start(inputs, scheduler, item, index)
    if IS_EVEN:
        load_even("""
END = """        index = next_index


@gluon.jit
def _even_warpgroup("""
LOAD = """    tile = tiles.index(BLOCK)
    if part.empty is not None:"""
LOADS = {
    "absent": """    tile = tiles.index(BLOCK)
    if descriptor is not None:
        mbarrier.arrive(part.full, count=1)
    elif part.empty is not None:""",
    "halved": """    tile = tiles.index(BLOCK)
    if column // 256 == gl.program_id(0) % 2:
        mbarrier.arrive(part.full, count=1)
    elif part.empty is not None:""",
}
CONSOLE = Console()


def copy_with_clocks(checkout: Path, target: Path, rows: str) -> None:
    for file in (KERNEL, LOADS_FILE):
        if not (checkout / file).is_file():
            sys.exit(f"--checkout must be a folder with {file}, got {checkout}")
    shutil.copytree(checkout / "mlakit", target / "mlakit")
    clocks = {
        FIRST_FUNCTION: WRITE + FIRST_FUNCTION,
        BEGIN: "    if IS_EVEN:\n        _write_clocks(0)\n" + BEGIN,
        END: END.replace("\n\n\n", "\n    if IS_EVEN:\n        _write_clocks(2)\n\n\n", 1),
    }
    _change(target / KERNEL, clocks)
    _change(target / LOADS_FILE, {LOAD: LOADS.get(rows, LOAD)})


def _change(path: Path, changes: dict[str, str]) -> None:
    source = path.read_text()
    for old, new in changes.items():
        if source.count(old) != 1:
            sys.exit(f"{path} must contain this once, found {source.count(old)} times:\n{old}")
        source = source.replace(old, new)
    path.write_text(source)


def measure(rows: str, rest_ms: float) -> Table:
    """Runs in a process that imports the copy as `mlakit`."""
    import torch

    clocks = torch.zeros(4 * 1024, dtype=torch.int64, device="cuda")
    os.environ[ADDRESS] = str(clocks.data_ptr())
    from mlakit.tools.bench.decode import Decode
    from mlakit.tools.bench.gpu_timers import ColdGpu
    from mlakit.tools.bench.problems import DenseDecode
    from mlakit.tools.bench.shapes import Batch

    timer = ColdGpu()
    table = Table("decode", "us", "GHz", "cycles of a CTA", title=f"rows: {rows}")
    for shape in SHAPES:
        case = Decode(Batch.parse(shape), HEADS).build_case()
        if rows == "zeros":
            assert isinstance(case.problem, DenseDecode)
            case.problem.pages.zero_()
            case.problem.q.zero_()
        times, speeds, lengths = [], [], []
        for _ in range(CALLS):
            sleep(rest_ms / 1e3)
            clocks.zero_()
            times.append(timer(case.call) * 1e6)
            written = clocks.view(-1, 4)[clocks.view(-1, 4)[:, 3] > 0].double()
            cycles, nanoseconds = written[:, 2] - written[:, 0], written[:, 3] - written[:, 1]
            speeds.append(float((cycles / nanoseconds).median()))
            lengths.append(float(cycles.median()))
        figures = f"{median(times):.1f}", f"{median(speeds):.3f}", f"{median(lengths):.0f}"
        table.add_row(f"{shape}, {HEADS} heads", *figures)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="own", choices=("own", "zeros", *LOADS))
    parser.add_argument("--rest", type=float, default=0.0, metavar="MS")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        CONSOLE.print(measure(asked.rows, asked.rest))
        return
    with tempfile.TemporaryDirectory() as folder:
        copy_with_clocks(asked.checkout, Path(folder), asked.rows)
        own = [sys.executable, __file__, "--measure", "--rows", asked.rows]
        environment = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run([*own, "--rest", str(asked.rest)], env=environment, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
