"""Break the CPU kernels one line at a time and see the tests notice.

    python scripts/mutate.py              every mutation; exit status 1 if one survives
    python scripts/mutate.py --list       what they are
    python scripts/mutate.py --only sink  those whose name contains a word

Each mutation is made in a copy of the project, in which the property tests of its op are run until
the first failure. A mutation that no test kills says that a test is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("mlakit", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    """One line of a kernel made wrong: `old`, which stands once in `file`, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    op: str

    def apply(self, root: Path) -> None:
        path = root / self.file
        source = path.read_text()
        if source.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.file} must hold the mutated text once, "
                f"got {source.count(self.old)} times"
            )
        path.write_text(source.replace(self.old, self.new))


def _of(kernel: str, op: str, *changes: tuple[str, str, str]) -> list[Mutation]:
    file = f"mlakit/kernels/cpu/{kernel}.py"
    return [Mutation(f"{op}: {name}", file, old, new, op) for name, old, new in changes]


MUTATIONS = [
    *_of(
        "decode",
        "mla_decode",
        ("drops the newest key", "last = min(span[1], ", "last = min(span[1] - 1, "),
        ("drops the oldest key", "first = max(span[0], ", "first = max(span[0] + 1, "),
        ("scale 2 % off", ".mul_(softmax_scale)", ".mul_(softmax_scale * 1.02)"),
        (
            "causal bound one too far",
            "mask.interval(kv_len - last + token, kv_len)",
            "mask.interval(kv_len - last + token + 1, kv_len)",
        ),
        (
            "unmasked tail",
            "block = keys[max(low - start, 0) : max(high - start, 0)]",
            "block = keys[max(low - start, 0) :]",
        ),
        ("ignores q_scale", "if q_scale is not None:", "if False:"),
        (
            "values one column off",
            "OnlineSoftmax.of((keys @ columns).T, keys[:, :v_width])",
            "OnlineSoftmax.of((keys @ columns).T, keys[:, -v_width:])",
        ),
    ),
    *_of(
        "workers",
        "mla_decode",
        ("leaves out an item", "deque(items), len(items)", "deque(items[1:]), len(items) - 1"),
    ),
    *_of(
        "softmax",
        "mla_decode",
        ("forgets the earlier tiles", "self.total.mul_(decay)", "self.total.mul_(0.0)"),
        ("does not rescale", "self.weighted.mul_(decay[..., None])", "pass"),
        ("ignores the sink", "if sink is not None:", "if False:"),
        ("base-2 lse", "self.total.log()", "self.total.log2()"),
    ),
    *_of(
        "merge",
        "merge_states",
        ("plain average", "(part_lse - divisor).exp()", "(part_lse * 0 + 1 / len(parts))"),
        ("reads empty parts", "torch.where((part_lse == -torch.inf)[..., None], 0.0,", "(0.0 +"),
    ),
    *_of(
        "prefill",
        "mla_prefill",
        ("scale 2 % off", ".mul_(softmax_scale)", ".mul_(softmax_scale * 1.02)"),
        (
            "drops the last key",
            "stop = min(start + tiling.keys, last)",
            "stop = min(start + tiling.keys, last - 1)",
        ),
        ("unmasked tail", "visible = None if is_full else", "visible = None if True else"),
        ("no alibi", "if alibi_slopes is not None:", "if False:"),
    ),
    *_of(
        "sparse",
        "sparse_mla",
        (
            "last row of the pool lost",
            "(chosen < self.layer.num_slots)",
            "(chosen < self.layer.num_slots - 1)",
        ),
        ("counts beyond topk_lens", "valid &= entry < self.lens", "valid &= entry <= self.lens"),
        ("forgets the second cache", "if extra is not None:", "if False:"),
    ),
    *_of(
        "indexer",
        "indexer_logits",
        ("no relu", ".relu_()", ""),
        ("sees the future", "~seen, -torch.inf", "~seen, 0.0"),
    ),
    *_of(
        "indexer",
        "indexer_topk",
        ("last column lost", "row_ends[block, None], -", "row_ends[block, None] - 1, -"),
        ("worst first", "descending=True", "descending=False"),
    ),
    *_of(
        "norm_rope_quant",
        "norm_rope_quant_append",
        (
            "position one off",
            "cos_sin = freqs[positions[block]]",
            "cos_sin = freqs[positions[block] + 1]",
        ),
        (
            "stores padding tokens",
            "written[written >= 0], rows[written >= 0]",
            "written.clamp_min(0), rows",
        ),
        ("epsilon ignored", "keepdim=True) + epsilon)", "keepdim=True) + 1e-30)"),
        (
            "gamma before rounding",
            "normalised.to(gamma.dtype) * gamma",
            "(normalised * gamma.float()).to(gamma.dtype)",
        ),
        ("turns the wrong way", "y0 = x0 * cos - ", "y0 = x0 * cos + "),
    ),
    *_of(
        "fp8",
        "quantize_fp8",
        ("no bound on amax", ".clamp_max(scale_ub)", ""),
        (
            "last group left out",
            "scales[matrices, :, tile] = scale.mT",
            "scales[:-1, tile] = scale.T[:-1]",
        ),
    ),
    *_of(
        "fp8",
        "scaled_mm_fp8",
        (
            "scales one group off",
            "a_scale[matrices, :, left].mT",
            "a_scale[matrices, :, left].mT.roll(1, 1)",
        ),
    ),
    *_of(
        "matmul",
        "batched_matmul",
        (
            "last tile lost",
            "yield slice(start, min(start + tile, rows))",
            "yield slice(start, min(start + tile, rows - 1))",
        ),
    ),
]


def is_killed(mutation: Mutation, folder: Path) -> tuple[bool, float]:
    """(killed, seconds): run the tests of the mutation's op in `folder` with the mutation made."""
    path = folder / mutation.file
    original = path.read_text()
    selected = f"match_the_oracle and {mutation.op}"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    started = perf_counter()
    try:
        mutation.apply(folder)
        finished = subprocess.run(
            [*command, "tests/ops/test_properties.py", "-k", selected],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(original)
    if finished.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.name}: pytest broke down\n{finished.stdout[-2000:]}")
    return finished.returncode == 1, perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="say what the mutations are, and stop")
    parser.add_argument("--only", default="", help="those whose name contains this")
    options = parser.parse_args()
    console = Console()
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    if options.list:
        for mutation in chosen:
            console.print(f"{mutation.name}  ({mutation.file})", highlight=False)
        return 0
    table = Table("mutation", "file", "verdict", "s", title="Kernels broken on purpose")
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        for mutation in track(chosen, "breaking kernels", console=console, transient=True):
            killed, seconds = is_killed(mutation, Path(folder))
            survivors += not killed
            verdict = "killed" if killed else "[bold red]SURVIVED[/]"
            table.add_row(mutation.name, mutation.file, verdict, f"{seconds:.0f}")
    console.print(table)
    console.print(f"{len(chosen) - survivors} of {len(chosen)} mutations killed")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
