"""Hopper's prefill kernel, compared with the oracle on poisoned inputs."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch

from mlakit import launch_cache, mla_prefill, reference
from mlakit.kernels.hopper.prefill import configs
from mlakit.model.masks import CAUSAL, NULL, Mask
from mlakit.tools.testing import assert_matches, assert_same_bits, poison
from mlakit.tools.workloads import PrefillCase
from mlakit.tools.workloads.paged import starts_of
from tests.pairs import pairwise as every_pair

WIDTHS = {  # D_N, D_R, D_V
    "192/128": (128, 64, 128),
    "256/256": (192, 64, 256),
    "128/128": (128, 0, 128),
    "96/64": (64, 32, 64),
    "256 without rope": (256, 0, 256),
    "128 of which 64 are rotated": (64, 64, 128),
}
LENGTHS = {  # kv_lens, q_lens
    "one token": ((1,), (1,)),
    "a tile less one, a tile, a tile and one": ((127, 128, 129), (127, 128, 129)),
    "one block of keys, so that the main loop is empty": ((128, 64, 5, 128), (128, 64, 5, 60)),
    "one block of keys of every width": ((64, 1, 40, 33), (64, 1, 17, 200)),
    "no keys": ((0, 0), (3, 200)),
    "some empty": ((0, 300, 77, 0, 40), (0, 300, 0, 9, 40)),
    "one query over a long context": ((1025, 640), (1, 1)),
    "cached context of no whole blocks": ((500, 411), (200, 129)),
    "more queries than keys": ((90, 130, 1), (140, 300, 129)),
    "tiles of each length": ((1100,), (1100,)),
}
MASKS = {
    "causal": CAUSAL,
    "null": NULL,
    "a window within a tile": Mask("sliding_window_causal", 30),
    "a window of several blocks": Mask("sliding_window_causal", 333),
    "a window that is not causal": Mask("sliding_window_noncausal", 200),
    "small chunks": Mask("chunked", 50),
    "chunks of several blocks": Mask("chunked", 300),
    "causal chunks": Mask("chunked_causal", 256),
}
OTHER_WIDTHS = tuple(WIDTHS)[1:]
EACH_WIDTH = pytest.mark.parametrize("widths", WIDTHS)
EACH_MASK = pytest.mark.parametrize("mask", MASKS)


def case(widths: str = "192/128", mask: str = "causal", **fields: object) -> PrefillCase:
    nope, rope, value = WIDTHS[widths]
    chosen = MASKS[mask]
    given = {
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "mask": chosen.kind,
        "window": chosen.window,
        "heads": 2,
    }
    return PrefillCase(**{**given, **fields})


@pytest.mark.gpu
@every_pair(lengths=list(LENGTHS), widths=list(WIDTHS), mask=["causal", "null"])
def test_lengths(lengths, widths, mask):
    kv_lens, q_lens = LENGTHS[lengths]
    case(widths, mask, kv_lens=kv_lens, q_lens=q_lens).run("cuda", "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mask", sorted(MASKS.keys() - {"causal", "null"}))
def test_masks(mask, lengths):
    kv_lens, q_lens = LENGTHS[lengths]
    case("192/128", mask, kv_lens=kv_lens, q_lens=q_lens).run("cuda", "hopper")


@pytest.mark.gpu
@EACH_WIDTH
@EACH_MASK
def test_masks_with_each_width(mask, widths):
    case(widths, mask, kv_lens=(700, 300, 5), q_lens=(600, 300, 9)).run("cuda", "hopper")


@pytest.mark.gpu
@every_pair(
    fields={
        "fp16": {"dtype": "fp16"},
        "sink": {"sink": "finite"},
        "mixed sink": {"sink": "mixed"},
        "negative scale": {"sharpness": -2.0},
        "no scale": {"sharpness": 0.0},
        "large scale": {"sharpness": 30.0},
        "expanded": {"expanded": True},
        "padded": {"padded": True},
        "given results": {"padded": True, "expanded": True, "given_results": True},
        "wide indices": {"wide_indices": True},
        "1 head": {"heads": 1},
        "7 heads": {"heads": 7},
    },
    mask=["causal", "null", "small chunks"],
    widths=list(WIDTHS),
)
def test_other_arguments(fields, mask, widths):
    case(widths, mask, kv_lens=(500, 0, 130), q_lens=(200, 0, 130), **fields).run("cuda", "hopper")


def test_the_main_loop_is_empty_where_it_is_said_to_be():
    kv_lens, _ = LENGTHS["one block of keys of every width"]
    assert set(configs.BLOCK_K) == set(WIDTHS.values())
    assert max(kv_lens) <= min(configs.BLOCK_K.values())


@pytest.mark.gpu
@EACH_WIDTH
@pytest.mark.parametrize(
    "fields", [{"dtype": "fp16"}, {"sink": "finite"}, {"sharpness": -2.0}], ids=str
)
def test_the_main_loop_is_empty(fields, widths):
    """PV after the loop must not use what is set up on entry to it."""
    kv_lens, q_lens = LENGTHS["one block of keys of every width"]
    case(widths, kv_lens=kv_lens, q_lens=q_lens, **fields).run("cuda", "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "null", "a window of several blocks"])
@pytest.mark.parametrize("num_sms", [1, 3, 20])
@pytest.mark.usefixtures("no_replay")
def test_many_tiles_per_cta(num_sms, mask, monkeypatch):
    """Stages wrap, and the number of blocks of a tile is odd and even."""
    from dataclasses import replace

    from mlakit.kernels.hopper.prefill import launch

    real = launch.target
    monkeypatch.setattr(launch, "target", lambda device: replace(real(device), num_sms=num_sms))
    lengths = (1, 64, 65, 0, 128, 200, 0, 127, 193, 700)
    contexts = (1, 100, 65, 0, 1000, 333, 77, 127, 321, 700)
    case("192/128", mask, kv_lens=contexts, q_lens=lengths, heads=3).run("cuda", "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed):
    draw = Random(seed)
    q_lens = tuple(draw.choice([0, 1, draw.randrange(400)]) for _ in range(draw.choice([1, 4, 30])))
    kv_lens = tuple(max(0, q_len + draw.choice([0, -3, draw.randrange(300)])) for q_len in q_lens)
    widths, mask = draw.choice(list(WIDTHS)), draw.choice(list(MASKS))
    case(widths, mask, kv_lens=kv_lens, q_lens=q_lens, seed=seed).run("cuda", "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mask", "widths", "dtype"),
    [
        *((mask, "192/128", torch.bfloat16) for mask in MASKS),
        *((mask, widths, torch.bfloat16) for mask in ("causal", "null") for widths in OTHER_WIDTHS),
        ("causal", "192/128", torch.float16),
    ],
    ids=str,
)
def test_values_that_are_not_finite_reach_exactly_the_queries_that_see_them(mask, widths, dtype):
    nope, rope, value = WIDTHS[widths]
    q_starts, kv_starts = [0, 300, 429], [0, 520, 649]
    own = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=own).to(dtype)

    q, k_nope = normal(429, 2, nope + rope), normal(649, 2, nope)
    k_rope, v = normal(649, rope), normal(649, 2, value)
    v[60, 0, 3], v[260, 1, 2], v[391, 1, 2] = torch.nan, torch.inf, torch.nan
    v[400, 1], v[519, 0, 0], v[600, 0, 7] = -torch.inf, torch.inf, torch.nan
    k_nope[300, 1, 0] = torch.nan
    given = {"softmax_scale": 0.1, "mask": MASKS[mask]}
    tensors = (q, k_nope, k_rope, v)
    exact = reference.mla_prefill(*tensors, q_starts, kv_starts, **given)
    naive = reference.mla_prefill(*tensors, q_starts, kv_starts, **given, dtype=torch.float32)
    starts = (
        torch.tensor(each, dtype=torch.int32, device="cuda") for each in (q_starts, kv_starts)
    )
    results = mla_prefill(*(each.cuda() for each in tensors), *starts, **given, backend="hopper")
    assert exact[0].isnan().any()
    for name, result, want, plain in zip(("out", "lse"), results, exact, naive, strict=True):
        assert_matches(name, result.cpu(), want, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "null"])
def test_row_max_stays_below_scores_that_grow_slowly(mask):
    """Scores that grow from block to block, by less than the rescaling threshold and by more."""
    q = torch.ones(256, 1, 192, dtype=torch.bfloat16)
    key = torch.arange(1024.0)
    growth = torch.where(key < 512, key * 0.01, key * 0.25 - 122)
    k_nope = (growth / 192).to(torch.bfloat16)[:, None, None].expand(1024, 1, 128).contiguous()
    k_rope = k_nope[:, 0, :64].contiguous()
    v = torch.randn(1024, 1, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    starts = [0, 256], [0, 1024]
    given = {"softmax_scale": 1.0, "mask": MASKS[mask]}
    tensors = (q, k_nope, k_rope, v)
    exact = reference.mla_prefill(*tensors, *starts, **given)
    naive = reference.mla_prefill(*tensors, *starts, **given, dtype=torch.float32)
    on_device = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in starts)
    results = mla_prefill(*(each.cuda() for each in tensors), *on_device, **given, backend="hopper")
    for name, result, want, plain in zip(("out", "lse"), results, exact, naive, strict=True):
        assert_matches(name, result.cpu(), want, plain)


LAUNCH = {"oracle": "batched", "expanded": True, "given_results": True}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "launch",
    [
        PrefillCase(
            **LAUNCH,
            seed=1765657173,
            kv_lens=(486, 595),
            q_lens=(486, 595),
            heads=4,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
            sharpness=4.0,
            sink="finite",
        ),
        PrefillCase(
            **LAUNCH,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            seed=862927364,
            padded=True,
            kv_lens=(381, 640, 979, 318, 536),
            q_lens=(384, 640, 256, 122, 0),
            heads=1,
            mask="sliding_window_causal",
            window=100,
            sharpness=4.0,
            sink="finite",
        ),
    ],
    ids=["256", "192"],
)
def test_a_large_weight_is_not_rounded(launch):
    """Rounded, it makes a row of each of these launches exceed its tolerance by 2 %."""
    launch.run("cuda", "hopper")


class Call:
    """`mla_prefill` of three requests on the GPU, whose lengths can be changed."""

    def __init__(self, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], heads: int = 4) -> None:
        own = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=own, device="cuda").to(torch.bfloat16)

        tokens, keys = sum(q_lens), sum(kv_lens)
        self.tensors = (
            normal(tokens, heads, 192),
            normal(keys, heads, 128),
            normal(keys, 64),
            normal(keys, heads, 128),
        )
        self.starts = tuple(
            torch.tensor(starts_of(lens), dtype=torch.int32, device="cuda")
            for lens in (q_lens, kv_lens)
        )

    def set_lengths(self, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> None:
        for starts, lens in zip(self.starts, (q_lens, kv_lens), strict=True):
            starts.copy_(torch.tensor(starts_of(lens)))

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_prefill(*self.tensors, *self.starts, softmax_scale=0.1, backend="hopper")

    def check(self, results: tuple[torch.Tensor, torch.Tensor]) -> None:
        tensors = [each.cpu() for each in self.tensors]
        starts = [each.tolist() for each in self.starts]
        exact = reference.mla_prefill(*tensors, *starts, softmax_scale=0.1)
        naive = reference.mla_prefill(*tensors, *starts, softmax_scale=0.1, dtype=torch.float32)
        for name, result, want, plain in zip(("out", "lse"), results, exact, naive, strict=True):
            assert_matches(name, result.cpu(), want, plain)


BEFORE = ((200, 100, 129), (400, 100, 300))
AFTER = ((1, 300, 128), (1, 671, 128))


@pytest.mark.gpu
def test_repeated_calls_are_replayed_and_take_new_lengths():
    """The third call and later ones replay the launches that the second recorded."""
    call = Call(*BEFORE)
    launch_cache.reset_stats()
    first = call()
    for _ in range(3):
        results = call()
        assert_same_bits("out", results[0], first[0])
        assert_same_bits("lse", results[1], first[1])
    assert launch_cache.stats()["mla_prefill"].hits >= 2
    call.check(first)
    call.set_lengths(*AFTER)
    call.check(call())


@pytest.mark.gpu
def test_a_graph_takes_new_lengths():
    call = Call(*BEFORE)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for lengths in (AFTER, BEFORE):
        call.set_lengths(*lengths)
        for result in results:
            poison(result)
        graph.replay()
        call.check(results)


@pytest.mark.gpu
def test_calls_on_two_streams_do_not_disturb_each_other():
    """Each has a schedule and a tile counter of its own."""
    call = Call((2000, 100), (2000, 2100), heads=16)
    want = call()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for _ in range(8):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(call())
    torch.cuda.synchronize()
    for out, lse in results:
        assert_same_bits("out", out, want[0])
        assert_same_bits("lse", lse, want[1])


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_elements():
    """k_nope and v are views of one tensor with a wide pitch; only its last rows are used."""
    heads, keys = 2, 300
    pitch = 1 << 23
    memory = torch.empty(keys * pitch, dtype=torch.bfloat16, device="cuda")
    own = torch.Generator("cuda").manual_seed(0)
    rows = memory.as_strided((keys, heads, 256), (pitch, 256, 1))
    rows.copy_(torch.randn(rows.shape, generator=own, device="cuda"))
    assert (keys - 1) * pitch > 2**31
    q = torch.randn(keys, heads, 192, generator=own, device="cuda").to(torch.bfloat16)
    k_rope = torch.randn(keys, 64, generator=own, device="cuda").to(torch.bfloat16)
    starts = torch.tensor([0, keys], dtype=torch.int32, device="cuda")
    given = {"softmax_scale": 0.1}
    got = mla_prefill(
        q, rows[..., :128], k_rope, rows[..., 128:], starts, starts, **given, backend="hopper"
    )
    packed = rows[..., :128].contiguous(), k_rope, rows[..., 128:].contiguous()
    want = mla_prefill(q, *packed, starts, starts, **given, backend="hopper")
    for name, result, other in zip(("out", "lse"), got, want, strict=True):
        assert_same_bits(name, result, other)


@pytest.mark.gpu
def test_a_request_alone_gives_the_same_bits():
    lengths = ((300, 1, 129), (300, 700, 140))
    call = Call(*lengths)
    together = call()
    bounds = [pairwise(starts_of(lens)) for lens in lengths]
    for (q_first, q_end), (kv_first, kv_end) in zip(*bounds, strict=True):
        q, *keys = call.tensors
        starts = (
            torch.tensor([0, length], dtype=torch.int32, device="cuda")
            for length in (q_end - q_first, kv_end - kv_first)
        )
        alone = mla_prefill(
            q[q_first:q_end],
            *(each[kv_first:kv_end] for each in keys),
            *starts,
            softmax_scale=0.1,
            backend="hopper",
        )
        for name, result, want in zip(("out", "lse"), alone, together, strict=True):
            assert_same_bits(name, result, want[q_first:q_end])
