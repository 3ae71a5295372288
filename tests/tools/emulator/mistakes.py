"""Mistakes in the source of Hopper's kernels: a function with some of its text replaced.

TELLING has a dropped wait or fence of each kind in every kernel. The emulator finds them, and on a
GPU they run under ConSan (`test_consan`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from triton.runtime.jit import JITFunction

from mlakit.tools.compile.configurations import HOPPER
from mlakit.tools.emulator.campaign import SUBJECTS
from mlakit.tools.workloads import Case

KERNELS = "mlakit.kernels."


@dataclass(frozen=True)
class Mistake:
    """Replacements in the source of a function of `mlakit.kernels.hopper`."""

    module: str
    function: str
    replacements: tuple[tuple[str, str], ...]

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the mistake in this scope."""
        function = getattr(import_module(f"{KERNELS}hopper.{self.module}"), self.function)
        original = changed = function.src
        for old, new in self.replacements:
            assert changed.count(old) == 1, f"{self.function} must have this once: {old}"
            changed = changed.replace(old, new)
        _change(function, changed)
        try:
            yield
        finally:
            _change(function, original)


def _change(function: JITFunction[Any], source: str) -> None:
    function._unsafe_update_src(source)
    # callers keep hashes of what they call
    for name, module in list(sys.modules.items()):
        for each in vars(module).values() if name.startswith(KERNELS) else ():
            if isinstance(each, JITFunction):
                each.hash = None


def dropped(module: str, function: str, statement: str) -> Mistake:
    return Mistake(module, function, ((f"    {statement}\n", "    pass\n"),))


@dataclass(frozen=True)
class Telling:
    """A mistake, the case that runs it, and the fault that the emulator reports."""

    case: Case
    mistake: Mistake
    fault: str


def _case(subject: str) -> Case:
    """The first case of a kernel's mutants: every stage is used again."""
    return SUBJECTS[subject].cases[0]


FENCE = "fence_async_shared()"
TELLING = {
    "m64_bf16: P1 is not waited for": Telling(
        _case("decode-m64_bf16"),
        dropped("decode.m64_bf16", "_even_pair", "mbarrier.wait(barriers.p_odd, phase)"),
        "Race",
    ),
    "m64_bf16: no fence after P0 is stored": Telling(
        _case("decode-m64_bf16"), dropped("decode.m64_bf16", "_even_pair", FENCE), "MissingFence"
    ),
    "m64_bf16: gathered rows are not waited for": Telling(
        _case("decode-m64_bf16-gather"),
        dropped("device.paged_loads", "wait_block", "mbarrier.wait(full, phase)"),
        "Race",
    ),
    "small_m_bf16: a stage is loaded before it is empty": Telling(
        _case("decode-small_m_bf16"),
        dropped(
            "device.pipeline", "_fill", "mbarrier.wait(pipeline.empty.index(stage), phase ^ 1)"
        ),
        "BarrierMisuse",
    ),
    "m64_fp8_qk: no fence after rows are read": Telling(
        _case("decode-m64_fp8_qk"),
        dropped("device.pipeline", "release_read", FENCE),
        "MissingFence",
    ),
    "m64_fp8_kv: a half is written before it is empty": Telling(
        replace(HOPPER["hopper-decode-m64-fp8"], kv_lens=(310, 65), q_lens=(2, 1)),
        dropped(
            "decode.m64_fp8_kv_dequant",
            "dequant_warpgroup",
            "mbarrier.wait(blocks.left_empty.index(stage), phase ^ 1)",
        ),
        "Race",
    ),
    "small_m_fp8_kv: probabilities are stored before they are used": Telling(
        _case("decode-small_m_fp8_kv"),
        dropped(
            "decode.small_m_fp8_kv_softmax",
            "_store_probs",
            "mbarrier.wait(probs.empty.index(stage), phase ^ 1)",
        ),
        "Race",
    ),
    "sparse m64_bf16: m1 is not waited for": Telling(
        _case("sparse-m64_bf16"),
        dropped("sparse.seesaw", "_even_pair", "mbarrier.wait(barriers.max_odd, phase)"),
        "Race",
    ),
    "sparse small_m_fp8_kv: a stage is copied before it is empty": Telling(
        _case("sparse-small_m_fp8_kv"),
        dropped(
            "sparse.small_m_fp8_kv",
            "_gather_warpgroup",
            "mbarrier.wait(latent.empty.index(stage), phase ^ 1)",
        ),
        "Race",
    ),
    "sparse small_m_fp4_kv: a raw stage is copied before it is empty": Telling(
        _case("sparse-small_m_fp4_kv"),
        dropped(
            "sparse.small_m_fp4_kv",
            "_gather_warpgroup",
            "mbarrier.wait(raw.empty.index(stage), phase ^ 1)",
        ),
        "Race",
    ),
    "prefill bf16: values are used before they are clean": Telling(
        _case("prefill-bf16"),
        dropped("prefill.bf16", "_step", "mbarrier.wait(values.clean.index(v_stage), v_phase)"),
        "Race",
    ),
    "prefill fp8: queries are not waited for": Telling(
        _case("prefill-fp8"),
        dropped(
            "prefill.fp8",
            "_consumer",
            "mbarrier.wait(queries.full.index(ROW0 // 64), tiles_done & 1)",
        ),
        "Race",
    ),
    "indexer: no fence after scales are read": Telling(
        _case("indexer"),
        Mistake(
            "indexer.consumer",
            "_score_tile",
            (("fence_async_shared()  # threads have read scales, which TMA writes again", "pass"),),
        ),
        "MissingFence",
    ),
}
