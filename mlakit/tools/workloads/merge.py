"""Cases of `merge_states`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlakit import reference
from mlakit.dispatch.knobs import Backend
from mlakit.ops import merge_states
from mlakit.tools.testing import assert_matches
from mlakit.tools.workloads.case import Case, Results, Trial, assert_given, assert_logits_match
from mlakit.tools.workloads.inputs import DTYPES, Inputs


@dataclass(frozen=True, kw_only=True, repr=False)
class MergeCase(Case):
    """One call of `merge_states`.

    empty          share of states without keys: lse −inf, out NaN
    spread         standard deviation of the parts' lse
    sink           "", "finite" or "mixed" (with ±inf)
    mixed          parts are in turn in `dtype` and in float32
    given_results  pass out= and lse=, out in float32 where the parts are mixed
    """

    op = "merge_states"

    num_parts: int = 3
    num_tokens: int = 5
    heads: int = 4
    v_width: int = 16
    dtype: str = "bf16"
    empty: float = 0.3
    spread: float = 2.0
    sink: str = ""
    mixed: bool = False
    given_results: bool = False

    def trial(self, device: torch.device | str) -> Trial:
        inputs = Inputs(device, self.seed, padded=self.padded)
        shape = (self.num_parts, self.num_tokens, self.heads)
        is_empty = inputs.chance(self.empty, *shape)
        part_lses = (self.spread * inputs.normal(*shape) + 3).masked_fill(is_empty, -torch.inf)
        part_outs = inputs.normal(*shape, self.v_width).masked_fill(is_empty[..., None], torch.nan)
        kinds = (self.dtype, "fp32" if self.mixed else self.dtype)
        outs = [inputs.place(f"outs[{i}]", part, kinds[i % 2]) for i, part in enumerate(part_outs)]
        lses = [inputs.place(f"lses[{i}]", part) for i, part in enumerate(part_lses)]
        sink = inputs.sink(self.sink, self.heads)
        given = {}
        if self.given_results:
            given["out"] = inputs.result("out", (*shape[1:], self.v_width), DTYPES[kinds[1]])
            given["lse"] = inputs.result("lse", shape[1:], torch.float32)

        def call(backend: Backend) -> Results:
            return merge_states(outs, lses, sink=sink, backend=backend, **given)

        def check(results: Results) -> None:
            def oracle(dtype: torch.dtype) -> Results:
                stored = torch.stack([out.cpu().double() for out in outs])
                on_cpu = None if sink is None else sink.cpu()
                return reference.merge_states(stored, part_lses, sink=on_cpu, dtype=dtype)

            exact, naive = oracle(torch.float64), oracle(torch.float32)
            for name, result in zip(("out", "lse"), results, strict=True):
                assert_given(name, result, given.get(name))
            assert_matches("out", results[0].cpu(), exact[0], naive[0])
            largest = part_lses.masked_fill(is_empty, 0.0).abs().amax(0)
            assert_logits_match("lse", results[1], exact[1], naive[1], largest)

        return Trial(inputs, call, check)
