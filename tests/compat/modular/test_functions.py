"""Every documented function in small on every backend, and the masks they take."""

from __future__ import annotations

import pytest
import torch

from tests.compat.modular.append_cases import RopeCase
from tests.compat.modular.attention_cases import DecodeCase, PrefillCase, SparseCase
from tests.compat.modular.contiguous_decoding import contiguous_decoding
from tests.compat.modular.inputs import E4M3, F32, SMALL_ROW, Step, make_mask
from tests.compat.modular.parameters import windowed_masks
from tests.seen_keys import SEES
from tests.transplant import calls_may_not_wait

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.hopper_too]


@pytest.mark.on_cpu
@windowed_masks
def test_a_mask_shows_what_is_documented(mask, window):
    functor, num_keys = make_mask(mask, window), 50
    positions, keys = torch.arange(num_keys), torch.arange(num_keys)
    want = torch.tensor([[SEES[mask](q, k, window) for k in range(num_keys)] for q in positions])
    assert torch.equal(functor.visible(positions, keys), want)
    for position in range(num_keys):
        first, last = functor.interval(position, num_keys)
        assert want[position].nonzero().flatten().tolist() == list(range(first, last))


TINY_STEP = Step((16, 0, 5, 3), (1, 3, 0, 2))
TINY_DECODE = {"row": SMALL_ROW, "step": TINY_STEP, "page_size": 7}
TINY_PREFILL = {"row": SMALL_ROW, "step": TINY_STEP, "d_n": 16, "d_v": 24, "page_size": 7}
SMALL_CASES = {
    "rope": lambda: RopeCase(row=SMALL_ROW, step=TINY_STEP, page_size=7),
    "rope-e4m3-slice": lambda: RopeCase(
        row=SMALL_ROW, step=TINY_STEP, cache_dtype=E4M3, out_dtype=E4M3, output="slice"
    ),
    "decode": lambda: DecodeCase(**TINY_DECODE),
    "decode-padded-window": lambda: DecodeCase(
        mask="sliding_window_causal", window=3, is_ragged=False, **TINY_DECODE
    ),
    "decode-rope-aware": lambda: DecodeCase(
        dtype=E4M3, has_token_scales=True, has_scale_pool=True, **TINY_DECODE
    ),
    "sparse": lambda: SparseCase(
        lengths=(5, 0, 3), stride=6, with_invalid=False, sink=torch.ones(3)
    ),
    "sparse-scale-per-token": lambda: SparseCase(
        lengths=(5, 0, 6), stride=6, has_token_scales=True, integers=torch.int64
    ),
    "prefill": lambda: PrefillCase(**TINY_PREFILL),
    "prefill-e4m3-alibi-window": lambda: PrefillCase(
        cache_dtype=E4M3, mask="sliding_window_causal", window=4, score_mod="alibi", **TINY_PREFILL
    ),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("make_case", SMALL_CASES.values(), ids=list(SMALL_CASES))
def test_a_small_case_on_every_backend(make_case):
    case = make_case()
    case.run()
    case.check()


@pytest.mark.gpu
@pytest.mark.parametrize("make_case", SMALL_CASES.values(), ids=list(SMALL_CASES))
def test_no_function_waits_for_the_gpu(make_case):
    make_case().run()  # compiles
    with calls_may_not_wait():
        make_case().run()


@pytest.mark.interpreted
def test_the_kernel_itself_on_every_backend():
    case = RopeCase(row=SMALL_ROW, step=TINY_STEP, cache_dtype=F32, dtype=F32)
    case.run_kernel()
    case.check()


@pytest.mark.interpreted
def test_contiguous_decoding_on_every_backend(generator):
    contiguous_decoding(generator, F32, E4M3, 2, 2, 19, 2, "chunked_causal", 4, parts=2)


@pytest.mark.interpreted
def test_split_on_every_backend():
    case = DecodeCase(**TINY_DECODE)
    case.run(torch.tensor([4, 3, 3]))
    case.check()
