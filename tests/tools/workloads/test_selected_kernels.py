"""Checks allow for what the selected kernel loses: they ask selection, not the tensors' device."""

from __future__ import annotations

import pytest
import torch

from mlakit.dispatch import selection
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.specs import pretending
from mlakit.tools.workloads import Case, DecodeCase, PrefillFp8Case
from tests.kernel_launchers import replace_launcher

V3 = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
PREFILL = PrefillFp8Case(heads=2, kv_lens=(40,), q_lens=(40,), **V3)
ROW = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "page_size": 64, "format": "fp8_block128"}
DECODE = DecodeCase(heads=128, kv_lens=(70,), q_lens=(1,), num_ctas=3, **ROW)


def lossy_results(case: Case, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> object:
    """Run a case with CPU kernels in place of Hopper's, all with the errors that those have.

    Returns a function that checks the results, outside of the scope in which the call was made.
    """
    (cpu,) = [each for each in selection.specs(case.op) if each.backend == "cpu"]
    own = cpu.launch

    def launch(arguments, out, lse):
        own(arguments, out, lse)
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(out.shape, generator=generator) * 2 - 1
        if isinstance(case, PrefillFp8Case):  # e4m3 probabilities
            out.copy_(out.float() * (1 + 2.0**-6 * noise))
        else:  # rows that are rounded to float16
            lse.add_(2.0**-12 * noise[..., 0])

    replace_launcher(monkeypatch, case.op, lambda _: launch)
    trial = case.trial("cpu")
    with pretending(90, 132):
        results = trial.call(backend)
    return lambda: trial.check(results)


@pytest.mark.parametrize("case", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_what_hoppers_kernels_lose_is_allowed_on_any_device(case, monkeypatch):
    lossy_results(case, "hopper", monkeypatch)()
    lossy_results(case, "auto", monkeypatch)()


@pytest.mark.parametrize("case", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_other_kernels_may_not_lose_it(case, monkeypatch):
    check = lossy_results(case, "triton", monkeypatch)
    with pytest.raises(AssertionError, match=r"^(out|lse)"):
        check()
