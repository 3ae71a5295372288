"""Mutation tests of synchronisation: which mutants of a kernel do the emulator's checks catch?

A subject is a kernel with the cases that its mutants run. The first case is the one whose IR is
mutated; the others reach operations that the first does not. `survivors.toml`, beside the tests,
lists the mutants that no check can catch, each with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mlakit.dispatch.names import Backend
from mlakit.tools.emulator.frontend import Mutate
from mlakit.tools.emulator.harness import CONFIGURATIONS, Outcome, run_trial
from mlakit.tools.emulator.mutations import Mutant, Name, mutants
from mlakit.tools.workloads import Case
from mlakit.tools.workloads.case import Trial

SEEDS = (0, 1, 2)


@dataclass(frozen=True, eq=False)
class Subject:
    """A kernel whose mutants are run in `cases`, in order, until one catches them."""

    kernel: str
    cases: tuple[Case, ...]
    backend: Backend = "hopper"

    @cached_property
    def trials(self) -> list[Trial]:
        """The cases with their inputs, which all mutants share."""
        return [case.trial("cpu") for case in self.cases]

    @cached_property
    def mutants(self) -> list[Mutant]:
        """The mutants of the kernel as the first case compiles it."""
        return mutants(self.kernel, self.text)

    @cached_property
    def text(self) -> str:
        """The IR of the kernel as the first case compiles it, which runs without a fault."""
        texts: dict[str, str] = {}

        def keep(kernel: str, text: str) -> str:
            texts[kernel] = text
            return text

        outcome = self.attempt(self.trials[0], self.kernel, 0, keep)
        if not outcome.passed:
            raise AssertionError(f"the kernel without a mutation fails: {outcome}")
        if self.kernel not in texts:
            raise ValueError(f"the case must launch {self.kernel}, got {', '.join(texts)}")
        return texts[self.kernel]

    def run(self, name: Name) -> Outcome:
        """Run the mutant of a name with every case and seed until one catches it.

        Returns the outcome that caught it, or the last one.
        """

        def mutate(kernel: str, text: str) -> str:
            if kernel != name.kernel:
                return text
            # a case may specialise the kernel otherwise, and then lacks the mutant
            named = [each for each in mutants(kernel, text) if each.name == name]
            return named[0].text(text) if named else text

        return self.attempts(str(name), mutate)[-1]

    def attempts(self, name: str, mutate: Mutate | None = None) -> list[Outcome]:
        """Run every case with every seed until one fails; the outcomes are called `name`."""
        outcomes = []
        for trial in self.trials:
            for seed in SEEDS:
                outcomes.append(self.attempt(trial, name, seed, mutate))
                if not outcomes[-1].passed:
                    return outcomes
        return outcomes

    def attempt(self, trial: Trial, name: str, seed: int, mutate: Mutate | None = None) -> Outcome:
        """Run a trial once; the outcome calls it `name`."""
        return run_trial(trial, name, seed, backend=self.backend, mutate=mutate)


def _cases(configuration: str, *changes: dict[str, Any]) -> tuple[Case, ...]:
    return tuple(replace(CONFIGURATIONS[configuration], **each) for each in changes)


# several pairs of blocks and several tiles for each CTA, so that every stage is used again; then
# tiles of one block, with which a warpgroup is as far ahead of another as it can be
_SHORT = {"kv_lens": (60, 700, 64, 30, 1, 300), "q_lens": (1,) * 6}
_M64 = ({"kv_lens": (310, 65), "q_lens": (2, 1)}, _SHORT)
_SMALL_M = ({"kv_lens": (1900, 300)}, _SHORT)
_SPARSE = ({"topk": 512}, {"topk": 64, "num_tokens": 7})
# each stage several times, with scores that need a rescale in most blocks; then tiles of one block
_SPARSE_BLACKWELL = (
    {"topk": 400, "num_tokens": 1, "with_lens": False, "sharpness": 6.0},
    {"topk": 64},
)
# several tiles for each CTA, of several blocks and of one; most blocks need a rescale
_DECODE_BLACKWELL = (
    {"kv_lens": (700, 300), "q_lens": (1, 1), "sharpness": 6.0},
    {"kv_lens": (60, 700, 64, 30, 1, 300), "q_lens": (1,) * 6},
)
# Tiles of several blocks, some of which one warpgroup sees and the other does not; a window with
# keys outside of it whose values are not finite; tiles of one block
_PREFILL = (
    {"kv_lens": (700, 300), "q_lens": (252, 60)},
    {"kv_lens": (578, 279), "q_lens": (130, 130), "mask": "sliding_window_causal", "window": 50},
    {"kv_lens": (60, 70, 40), "q_lens": (60, 70, 40)},
)
# the same for tiles of 256 queries, with scores that need a rescale in most blocks
_PREFILL_BLACKWELL = (
    {"kv_lens": (900, 300), "q_lens": (380, 60), "sharpness": 6.0},
    {"kv_lens": (578, 279), "q_lens": (300, 130), "mask": "sliding_window_causal", "window": 50},
    {"kv_lens": (60, 70, 40), "q_lens": (60, 70, 40)},
)
# the same, with more blocks than there are stages
_PREFILL_FP8_BLACKWELL = (
    {"kv_lens": (1300, 300), "q_lens": (260, 60), "sharpness": 6.0},
    *_PREFILL_BLACKWELL[1:],
)
_INDEXER = {"kv_lens": (1500, 700, 300, 900, 100, 600), "q_lens": (1,) * 6}
SUBJECTS: dict[str, Subject] = {
    "decode-m64_bf16": Subject(
        "mla_decode_m64_bf16_kernel", _cases("hopper-decode-h128-bf16", *_M64)
    ),
    "decode-m64_bf16-gather": Subject(
        "mla_decode_m64_bf16_kernel", _cases("hopper-decode-h128-bf16-page1", *_M64)
    ),
    "decode-small_m_bf16": Subject(
        "mla_decode_small_m_bf16_kernel",
        # with 8 heads there is one stage more
        (
            *_cases("hopper-decode-h16-bf16", *_SMALL_M),
            *_cases("hopper-decode-h8-bf16", _SMALL_M[0]),
        ),
    ),
    "decode-m64_fp8_kv": Subject(
        "mla_decode_m64_fp8_kv_kernel", _cases("hopper-decode-m64-fp8_block128", *_M64)
    ),
    "decode-m64_fp8_qk": Subject(
        "mla_decode_m64_fp8_qk_kernel", _cases("hopper-decode-m64-fp8_token-e4m3-q", *_M64)
    ),
    "decode-small_m_fp8_kv": Subject(
        "mla_decode_small_m_fp8_kv_kernel",
        (
            *_cases("hopper-decode-h16-fp8_block128", *_SMALL_M),
            *_cases("hopper-decode-h8-fp8_block128", _SMALL_M[0]),
        ),
    ),
    "decode-small_m_fp4_kv": Subject(
        "mla_decode_small_m_fp4_kv_kernel", _cases("hopper-decode-h16-mxfp4_block32", *_SMALL_M)
    ),
    "sparse-m64_bf16": Subject(
        "sparse_mla_m64_bf16_kernel", _cases("hopper-sparse-h128-bf16", *_SPARSE)
    ),
    "sparse-m64_fp8_kv": Subject(
        "sparse_mla_m64_fp8_kv_kernel", _cases("hopper-sparse-fp8_block128", *_SPARSE)
    ),
    "sparse-small_m_fp8_kv": Subject(
        "sparse_mla_small_m_fp8_kv_kernel",
        # with 8 heads there are more stages
        _cases("hopper-sparse-h16-fp8_block128", *_SPARSE, {"heads": 8, "topk": 1024}),
    ),
    "sparse-small_m_fp4_kv": Subject(
        "sparse_mla_small_m_fp4_kv_kernel",
        # with 32 heads there is one stage less
        (
            *_cases("hopper-sparse-h16-mxfp4_block32", *_SPARSE),
            *_cases("hopper-sparse-h32-mxfp4_block32-extra", {"topk": 400, "num_splits": 1}),
        ),
    ),
    "blackwell-sparse-m128_bf16": Subject(
        "sparse_mla_m128_bf16_kernel",
        _cases("blackwell-sparse-h128-bf16", *_SPARSE_BLACKWELL),
        backend="blackwell",
    ),
    "blackwell-sparse-n64_bf16": Subject(
        "sparse_mla_n64_bf16_kernel",
        # with 16 heads there is one stage more
        (
            *_cases("blackwell-sparse-h64-bf16", *_SPARSE_BLACKWELL),
            *_cases("blackwell-sparse-h16-q-rope", _SPARSE_BLACKWELL[0]),
        ),
        backend="blackwell",
    ),
    "blackwell-sparse-n64_fp8_kv": Subject(
        "sparse_mla_n64_fp8_kv_kernel",
        # with 16 heads there is one stage more
        (
            *_cases("blackwell-sparse-h64-fp8_block128", *_SPARSE_BLACKWELL),
            *_cases("blackwell-sparse-h16-fp8_block128-extra", _SPARSE_BLACKWELL[0]),
        ),
        backend="blackwell",
    ),
    "blackwell-decode-n64_bf16": Subject(
        "mla_decode_n64_bf16_kernel",
        # with 16 heads there is one stage more
        (
            *_cases("blackwell-decode-h64-bf16", *_DECODE_BLACKWELL),
            *_cases("blackwell-decode-h16-fp16-page1", _DECODE_BLACKWELL[0]),
        ),
        backend="blackwell",
    ),
    "blackwell-decode-n64_fp8_kv": Subject(
        "mla_decode_n64_fp8_kv_kernel",
        # with 16 heads there is one stage more
        (
            *_cases("blackwell-decode-h64-fp8_block128", *_DECODE_BLACKWELL),
            *_cases("blackwell-decode-h16-fp8_block128-page1", _DECODE_BLACKWELL[0]),
        ),
        backend="blackwell",
    ),
    "blackwell-prefill-bf16": Subject(
        "mla_prefill_bf16_kernel",
        # two query tiles for a work tile; then one, and the order of loads that goes with it
        (
            *_cases("blackwell-prefill-192-128", *_PREFILL_BLACKWELL),
            *_cases("blackwell-prefill-256-256", *_PREFILL_BLACKWELL),
        ),
        backend="blackwell",
    ),
    "blackwell-prefill-fp8": Subject(
        "mla_prefill_e4m3_kernel",
        _cases("blackwell-prefill-fp8", *_PREFILL_FP8_BLACKWELL),
        backend="blackwell",
    ),
    "blackwell-indexer": Subject(
        "indexer_logits_m128_kernel",
        # warpgroups with other keys of a tile; then with other tokens, and more stages
        (
            *_cases("blackwell-indexer-h64-q1", _INDEXER),
            *_cases("blackwell-indexer-h64-q4", {**_INDEXER, "q_lens": (4,) * 6}),
        ),
        backend="blackwell",
    ),
    "prefill-bf16": Subject("mla_prefill_kernel", _cases("hopper-prefill-192-128", *_PREFILL)),
    "prefill-fp8": Subject("mla_prefill_fp8_kernel", _cases("hopper-prefill-fp8", *_PREFILL)),
    # several tiles for each CTA, and every stage again; swapped, a tile whose second half of K has
    # no step
    "fp8-plain": Subject(
        "scaled_mm_fp8_kernel",
        _cases("hopper-scaled-mm-256x128", {"m": 600, "n": 200}, {"m": 300, "n": 600, "k": 96}),
    ),
    "fp8-swapped": Subject(
        "scaled_mm_fp8_kernel",
        _cases("hopper-scaled-mm-swapped-32", {"k": 1296}, {"n": 400, "k": 96}),
    ),
    "indexer": Subject("indexer_logits_kernel", _cases("hopper-indexer-h32-q1", _INDEXER)),
}


def names(subject: str) -> list[Name]:
    """Return the names of a subject's mutants."""
    return [mutant.name for mutant in SUBJECTS[subject].mutants]


def run_mutant(subject: str, name: Name) -> Outcome:
    """Run a mutant of a subject until a case and seed catch it."""
    return SUBJECTS[subject].run(name)


def run_cases(subject: str) -> list[Outcome]:
    """Run a subject's kernel without a mutation, in the cases and with the seeds of its mutants."""
    return SUBJECTS[subject].attempts(subject)


def run_part(subject: str, part: int, parts: int) -> dict[Name, Outcome]:
    """Run every `parts`-th mutant of a subject, from number `part` on."""
    return {name: run_mutant(subject, name) for name in names(subject)[part::parts]}
