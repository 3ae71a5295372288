"""Hopper's indexer kernel: what it takes, how its work is shared out, and its logits."""

from __future__ import annotations

from random import Random

import pytest
import torch

from mlakit import PagedLatentCache, indexer_logits
from mlakit.dispatch import knobs, selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.specs import Problem, Use, pretending
from mlakit.kernels.hopper.decode.configs import OTHER_SMEM_BYTES, REGISTERS, SMEM_BYTES
from mlakit.kernels.hopper.indexer.configs import (
    CONFIGS,
    MAX_SINGLE_TOKENS,
    fits_int32,
    is_single_block,
    pick_config,
)
from mlakit.model.geometry import RowShape
from mlakit.tools.workloads import IndexerLogitsCase
from tests.kernels.hopper.device_functions import on_cpu
from tests.pairs import pairwise

E4M3 = "torch.float8_e4m3fn"
KEYS = {"kv_lora_rank": 128, "qk_rope_head_dim": 0, "format": "fp8_token", "page_size": 64}
EVERY_CONFIG = pytest.mark.parametrize("config", CONFIGS.values(), ids=map(str, CONFIGS))


def problem(**fields: object) -> Problem:
    given = {"dtype": E4M3, "format": "fp8_token", "heads": 64, "page_size": 64, "mask": "causal"}
    return Problem("cuda", 90, **{**given, "row": RowShape(128, 0), **fields})


@pytest.mark.parametrize(
    "fields",
    [{}, {"heads": 1}, {"heads": 33}, {"mask": "null"}, {"page_size": 192}],
    ids=str,
)
def test_what_the_kernel_takes(fields):
    assert selection.select("indexer_logits", problem(**fields)).backend == "hopper"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": "bf16"}, "needs keys of fp8_token, got bf16"),
        ({"dtype": "torch.bfloat16"}, f"needs queries of {E4M3}, got torch.bfloat16"),
        ({"heads": 65}, "needs 1 to 64 heads, got 65"),
        ({"heads": 0}, "needs 1 to 64 heads, got 0"),
        ({"page_size": 32}, "needs pages of a multiple of 64 keys, got 32"),
        (
            {"row": RowShape(64, 0)},
            "needs keys of 128 columns, none of them rotated, got 64 + 0 columns",
        ),
        (
            {"row": RowShape(64, 64)},
            "needs keys of 128 columns, none of them rotated, got 64 + 64 columns",
        ),
        ({"row": None}, "needs keys of 128 columns, none of them rotated, got none"),
        ({"mask": "chunked"}, "needs a mask of null or causal, got chunked"),
        ({"uses": (Use.FLAT_PAGE_TABLE,)}, "takes no flat page table"),
    ],
    ids=str,
)
def test_what_is_left_to_the_portable_kernel(fields, reason):
    asked = problem(**fields)
    assert selection.explain("indexer_logits", asked)["hopper"] == reason
    assert selection.select("indexer_logits", asked).backend == "triton"


def test_the_kernel_needs_sm_90():
    for where, got in ((("cuda", 100), "sm_100"), (("cpu", 0), "cpu")):
        asked = Problem(*where, dtype=E4M3, format="fp8_token")
        assert selection.explain("indexer_logits", asked)["hopper"] == f"needs sm_90, got {got}"


def arguments(pages: torch.Tensor) -> dict[str, object]:
    return {
        "q": torch.zeros(2, 4, 128).to(torch.float8_e4m3fn),
        "weights": torch.zeros(2, 4),
        "cache": PagedLatentCache.wrap_index_keys(pages),
        "page_table": torch.zeros(2, 1, dtype=torch.int32),
        "kv_lens": torch.tensor([3, 64], dtype=torch.int32),
    }


PAGES = torch.zeros(4, 64, 132, dtype=torch.uint8)
LOOSE = {
    "flat page table": {
        "page_table": (torch.tensor([0, 3, 67]).int(), torch.arange(67, dtype=torch.int32))
    },
    "unaligned rows of q": {"q": torch.zeros(1, 4, 128).to(torch.float8_e4m3fn).expand(2, 4, 128)},
    "unaligned rows of the cache": {
        "cache": PagedLatentCache.wrap_index_keys(
            torch.zeros(4, 64 * 132 + 16, dtype=torch.uint8)[:, : 64 * 132].unflatten(1, (64, 132))
        )
    },
    "unaligned scales of the cache": {
        "cache": PagedLatentCache.wrap(
            torch.zeros(4, 64, 128, dtype=torch.uint8),
            RowShape(128, 0),
            format="fp8_token",
            scales=torch.zeros(4, 64, 2)[:, :, :1],
        )
    },
    "unaligned scales of the cache, pages apart": {
        "cache": PagedLatentCache.wrap(
            torch.zeros(4, 64, 128, dtype=torch.uint8),
            RowShape(128, 0),
            format="fp8_token",
            scales=torch.zeros(4, 66, 1)[:, :64],  # page 1 begins 264 bytes behind page 0
        )
    },
}


@pytest.mark.parametrize("use", LOOSE)
def test_tensors_that_tma_cannot_address(use):
    given = arguments(PAGES) | LOOSE[use]
    with pretending(90), pytest.raises(UnsupportedError, match=f"takes no {use.partition(',')[0]}"):
        indexer_logits(**given, backend="hopper")


@EVERY_CONFIG
def test_configs_fit_an_sm(config):
    assert config.smem_bytes + OTHER_SMEM_BYTES <= SMEM_BYTES
    assert config.warpgroups in (2, 4)
    warpgroups = config.warpgroups + 1  # of registers, the producer's included
    assert warpgroups * 128 * config.MAX_REGISTERS <= REGISTERS
    shared_out = config.warpgroups * config.CONSUMER_REGISTERS + config.PRODUCER_REGISTERS
    assert shared_out <= warpgroups * config.MAX_REGISTERS
    # sums over token blocks have a closed form only if each divides a tile
    assert config.KEYS % config.TOKENS == config.FILL_COLUMNS % config.TOKENS == 0


@pytest.mark.parametrize(
    ("tokens", "batch", "block"),
    [(7, 7, 1), (1, 8, 1), (8, 7, 2), (14, 7, 2), (15, 7, 4), (28, 7, 4), (29, 7, 8), (2048, 1, 8)],
)
def test_token_blocks_are_as_large_as_a_request_has_queries(tokens, batch, block):
    assert not is_single_block(tokens=tokens, batch=batch)
    for heads, padded in ((1, 32), (32, 32), (33, 64), (64, 64)):
        config = pick_config(heads=heads, tokens=tokens, batch=batch)
        assert block == config.TOKENS
        assert padded == config.HEADS


def test_a_batch_of_one_token_block():
    for tokens in range(1, 12):
        assert is_single_block(tokens=tokens, batch=1) == (tokens <= MAX_SINGLE_TOKENS)
        assert not is_single_block(tokens=tokens, batch=2)
    for tokens in range(1, MAX_SINGLE_TOKENS + 1):
        assert tokens <= pick_config(heads=64, tokens=tokens, batch=1).TOKENS


def test_huge_results_are_counted_in_int64():
    config = pick_config(heads=64, tokens=8192, batch=1)
    assert fits_int32(config, tokens=8192, batch=1, columns=131072)
    assert not fits_int32(config, tokens=2**23, batch=1, columns=2**20)
    assert not fits_int32(config, tokens=8, batch=1, columns=2**23)


BATCHES = {
    "one key": ((1,), (1,)),
    "nothing cached": ((0, 0), (1, 3)),
    "no query tokens": ((5, 9, 300), (0, 0, 1)),
    "lengths around tiles": ((127, 128, 129, 255, 256, 257, 0, 1), (1, 2, 3, 4, 5, 6, 7, 1)),
    "a prompt": ((900,), (900,)),
    "a prompt with context": ((2000, 77), (300, 77)),
    "more queries than keys": ((3, 0, 20, 200), (10, 4, 30, 400)),
    "one long request": ((5000, 1, 2, 0, 3), (1, 1, 1, 1, 1)),
    "more requests than are added up at once": ((40,) * 300 + (700,) + (3,) * 300, (1,) * 601),
}


def count_writes(written, work, tiles, is_causal) -> None:
    """tiles  the key tile of each column"""
    key = torch.arange(written.shape[1])
    step = int(work.step)
    is_own = (tiles >= work.first_tile) & (tiles < work.end_tile)
    is_own &= tiles % step == int(work.first_tile) % step
    for own in range(int(work.count)):
        end = int(work.first_end) + (own if is_causal else 0)
        row = written[int(work.token) + own]
        row += (key < end) & is_own
        row += 100 * ((key >= work.fill_first) & (key < work.fill_end) & (key >= end))


def seen_once(kv_lens, q_lens, columns, is_causal) -> torch.Tensor:
    """What `count_writes` gives if each logit is written once."""
    seen = torch.tensor(
        [
            kv_len - q_len + i + 1 if is_causal else kv_len
            for kv_len, q_len in zip(kv_lens, q_lens, strict=True)
            for i in range(q_len)
        ]
    )
    return torch.where(torch.arange(columns) < seen[:, None], 1, 100).int()


def walk(config, kv_lens, q_lens, columns, is_causal, num_ctas, line) -> tuple[torch.Tensor, list]:
    """int32 [tokens, columns]: how often each logit is written, as a score; and as −inf, 100 times
    that. And the work tiles of each CTA."""
    from mlakit.kernels.hopper.indexer import scheduler

    starts = torch.tensor([0, *q_lens]).cumsum(0).tolist()
    memory = torch.tensor([*starts, *kv_lens])
    written = torch.zeros(starts[-1], columns, dtype=torch.int32)
    key, shares = torch.arange(columns), []
    for cta in range(num_ctas):
        device = on_cpu(scheduler, memory, cta, num_ctas)
        requests = device.Requests(
            *(torch.tensor(0), torch.tensor(len(starts)), torch.tensor(0)),
            *(1, 1, 0, 1, starts[-1], 0, columns, is_causal, False),
            *(config.TOKENS, config.KEYS, config.FILL_COLUMNS),
        )
        request, block, tile, left = device.first_work_tile(requests, len(kv_lens), line)
        shares.append(int(left))
        while left > 0:
            work = device.locate_block(requests, request, block, tile, left)
            assert work.num_tiles >= 0
            count_writes(written, work, key // config.KEYS, is_causal)
            request, block, tile, left = device.next_block(work, request, block, left)
        assert left == 0
    return written, shares


# a quarter of the calls of the scheduler: each batch with every other config, and a causal mask
@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "is_causal", "config"),
    [
        pytest.param(
            batch,
            is_causal,
            config,
            marks=[] if is_causal and (i + j) % 2 == 0 else [pytest.mark.thorough],
            id=f"{batch}-{is_causal}-{name}",
        )
        for i, batch in enumerate(BATCHES)
        for is_causal in (True, False)
        for j, (name, config) in enumerate(CONFIGS.items())
    ],
)
def test_every_logit_is_written_once(batch, is_causal, config):
    kv_lens, q_lens = BATCHES[batch]
    num_ctas = 3 if len(kv_lens) > 100 else 7
    columns = max(kv_lens) + Random(batch).choice([1, 130, 9000])
    line = torch.int64 if is_causal else torch.int32
    written, shares = walk(config, kv_lens, q_lens, columns, is_causal, num_ctas, line)
    assert max(shares) - min(shares) <= 1
    assert torch.equal(written, seen_once(kv_lens, q_lens, columns, is_causal))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("tokens", range(MAX_SINGLE_TOKENS + 1))
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("kv_len", [0, 1, 2, 127, 128, 129, 255, 256, 257, 5000])
def test_every_logit_of_a_single_token_block_is_written_once(kv_len, padding, tokens, is_causal):
    """Rows of padding after the last query are not written."""
    from mlakit.kernels.hopper.indexer import scheduler

    rows = min(tokens + padding, MAX_SINGLE_TOKENS)
    if rows == 0:
        return  # the op starts no kernel
    config, num_ctas = CONFIGS[64, {3: 4}.get(rows, rows)], 7
    memory = torch.tensor([0, tokens, kv_len])
    for columns in (max(kv_len, 1), kv_len + 130, kv_len + 9000):
        written = torch.zeros(rows, columns, dtype=torch.int32)
        for cta in range(num_ctas):
            device = on_cpu(scheduler, memory, cta, num_ctas)
            requests = device.Requests(
                *(torch.tensor(0), torch.tensor(2), torch.tensor(0), 1, 1, 0, 1),
                *(rows, 0, columns, is_causal, True),
                *(config.TOKENS, config.KEYS, config.FILL_COLUMNS),
            )
            work = device.locate_single(requests)
            count_writes(written, work, torch.arange(columns) // config.KEYS, is_causal)
        expected = torch.zeros_like(written)
        if tokens:
            expected[:tokens] = seen_once([kv_len], [tokens], columns, is_causal)
        assert torch.equal(written, expected)


def test_a_length_beyond_the_columns_stays_within_the_row():
    config = CONFIGS[64, 1]
    written, _ = walk(config, (500, 300), (1, 1), 300, True, 4, torch.int32)
    assert bool((written == 1).all())


LENGTHS = {
    "one token": ((1,), (1,)),
    "around pages and tiles": ((63, 64, 65, 127, 128, 129, 255, 256, 257), (1,) * 9),
    "nothing cached": ((0, 0), (1, 1)),
    "some empty": ((0, 200, 0, 1), (1, 1, 1, 1)),
    "long": ((9000, 3), (1, 1)),
    "two queries": ((130, 64, 2, 700), (2, 2, 2, 2)),
    "three queries": ((130, 64, 3), (3, 3, 3)),
    "four queries": ((130, 64, 4), (4, 4, 4)),
    "ragged, none of one": ((300, 70, 129), (5, 0, 1)),
    "a prompt": ((300,), (300,)),
    "prompts with context": ((700, 90, 64), (40, 90, 1)),
    "many requests": ((100,) * 300, (1,) * 300),
}


def run(**fields: object) -> None:
    IndexerLogitsCase(**{**KEYS, "dtype": "e4m3", "heads": 64, **fields}).run("cuda", "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize(("kv_lens", "q_lens"), LENGTHS.values(), ids=LENGTHS.keys())
def test_lengths(kv_lens, q_lens, heads):
    run(kv_lens=kv_lens, q_lens=q_lens, heads=heads)


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 2, 3])
def test_padding_after_a_single_token_block_changes_no_logit(q_len):
    """On a GPU the op cannot see that rows follow the last query."""
    pages = torch.randint(0, 120, (6, 64 * 132), dtype=torch.uint8)  # finite e4m3
    pages[:, 64 * 128 :] = torch.rand(6, 64).view(torch.uint8)  # scales
    cache = PagedLatentCache.wrap_index_keys(pages.view(6, 64, 132).cuda())
    q = torch.randn(4, 4, 128).to(torch.float8_e4m3fn).cuda()
    weights = torch.rand(4, 4).cuda()
    table = torch.tensor([[5, 2, 0]], dtype=torch.int32).cuda()
    kv_lens = torch.tensor([150], dtype=torch.int32).cuda()
    starts = torch.tensor([0, q_len], dtype=torch.int32).cuda()
    out = torch.full((4, 192), 7.0, device="cuda")
    indexer_logits(q, weights, cache, table, kv_lens, q_starts=starts, out=out, backend="hopper")
    alone = indexer_logits(
        q[:q_len], weights[:q_len], cache, table, kv_lens, q_starts=starts, backend="triton"
    )
    assert bool((out[q_len:] == 7.0).all())
    assert torch.equal(out[:q_len].isneginf(), alone.isneginf())
    seen = alone.isfinite()
    largest = float(alone[seen].abs().max())
    torch.testing.assert_close(out[:q_len][seen], alone[seen], rtol=0, atol=2e-3 * largest)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 31, 33, 63])
@pytest.mark.parametrize("q_len", [1, 2, 4, 9])
def test_heads(q_len, heads):
    run(kv_lens=(300, 64), q_lens=(q_len, q_len), heads=heads)


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 2, 4, 9])
@pytest.mark.parametrize(
    "fields",
    [
        {"mask": "null"},
        {"page_size": 128},
        {"page_size": 192},
        {"num_layers": 2},
        {"wide_indices": True},
        {"given_results": True},
        {"spare_columns": None},
        {"spare_columns": 0},
        {"spare_columns": 20000},
        {"power_of_two": True},
    ],
    ids=str,
)
def test_forms_of_arguments(fields, q_len):
    run(**{"kv_lens": (400, 65), "q_lens": (q_len, q_len), **fields})


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
def test_random_batches(seed):
    draw = Random(seed)
    most = draw.choice([1, 2, 4, 40])
    q_lens = tuple(draw.randrange(most + 1) for _ in range(draw.choice([1, 3, 20])))
    kv_lens = tuple(q + draw.randrange(draw.choice([5, 2000])) for q in q_lens)
    run(
        seed=seed,
        kv_lens=kv_lens,
        q_lens=q_lens,
        heads=draw.choice([32, 64]),
        mask=draw.choice(["causal", "null"]),
        spare_columns=draw.choice([0, 5, 9000]),
    )


@pytest.mark.gpu
def test_keys_and_scales_in_one_page():
    """The layout of vLLM and DeepGEMM, with padded pages and results."""
    generator = torch.Generator("cuda").manual_seed(0)
    pages = torch.full((12, 67 * 128), 0x7F, dtype=torch.uint8, device="cuda")[:, : 64 * 132]
    cache = PagedLatentCache.wrap_index_keys(pages.unflatten(1, (64, 132)))
    rows = torch.randn(8 * 64, 128, generator=generator, device="cuda")
    cache.layer(0).write(torch.arange(8 * 64, device="cuda"), rows)
    table = torch.tensor([[3, 0, 7], [1, 2, 4]], dtype=torch.int32, device="cuda")
    q = torch.randn(2, 64, 128, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(2, 64, generator=generator, device="cuda")
    for lens in ((130, 64), (1, 192), (0, 65)):
        kv_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        out = torch.full((2, 300), torch.nan, device="cuda")[:, 1:201]
        got, want = (
            indexer_logits(
                q, weights, cache, table, kv_lens, max_kv_len=200, out=given, backend=backend
            )
            for backend, given in (("hopper", out), ("triton", None))
        )
        assert torch.equal(got.isneginf(), want.isneginf())
        assert torch.allclose(got, want, rtol=0, atol=2e-3 * float(want[want > -9e9].abs().max()))


@pytest.mark.gpu
def test_a_row_beyond_2_to_31():
    """Offsets of the result are int64; the last rows are those of a call of their own."""
    tokens, columns = 4200, 2**19
    pages = torch.zeros(3, 64, 132, dtype=torch.uint8, device="cuda")
    cache = PagedLatentCache.wrap_index_keys(pages)
    cache.layer(0).write(torch.arange(192, device="cuda"), torch.randn(192, 128, device="cuda"))
    q = torch.randn(tokens, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(tokens, 64, device="cuda")
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device="cuda")
    kv_lens = torch.tensor([190], dtype=torch.int32, device="cuda")

    def logits(first: int) -> torch.Tensor:
        starts = torch.tensor([0, tokens - first], dtype=torch.int32, device="cuda")
        given = {"q_starts": starts, "max_kv_len": columns, "backend": "hopper"}
        return indexer_logits(q[first:], weights[first:], cache, table, kv_lens, **given)

    whole = logits(0)
    assert whole.numel() > 2**31
    assert torch.equal(whole[-200:], logits(tokens - 200))
    assert bool(whole[: tokens - 190].isneginf().all())


@pytest.mark.gpu
@pairwise(kv_len=[0, 1, 63, 65, 256, 1500], q_len=[1, 2, 3, 4], heads=[20, 64])
def test_single_token_blocks(kv_len, q_len, heads):
    """A batch of one token block, whose queries may be more than its keys."""
    for mask, spare_columns in (("causal", 3), ("null", 9000)):
        run(
            kv_lens=(max(kv_len, q_len) if kv_len else 0,),
            q_lens=(q_len if kv_len else 1,),
            heads=heads,
            mask=mask,
            spare_columns=spare_columns,
        )


class Repeated:
    """A request of many keys over three pages: logits repeat with the pages."""

    def __init__(self, tokens: int, kv_len: int) -> None:
        self.kv_len = kv_len
        generator = torch.Generator("cuda").manual_seed(0)
        pages = torch.zeros(3, 64, 132, dtype=torch.uint8, device="cuda")
        self.cache = PagedLatentCache.wrap_index_keys(pages)
        rows = torch.randn(192, 128, generator=generator, device="cuda")
        self.cache.layer(0).write(torch.arange(192, device="cuda"), rows)
        q = torch.randn(tokens, 64, 128, generator=generator, device="cuda")
        self.q = q.to(torch.float8_e4m3fn)
        self.weights = torch.randn(tokens, 64, generator=generator, device="cuda")

    def logits(self, kv_lens: tuple[int, ...], q_lens: tuple[int, ...]) -> torch.Tensor:
        count = -(-self.kv_len // 64)
        table = torch.arange(count, dtype=torch.int32, device="cuda") % 3
        starts = torch.tensor([0, *q_lens]).cumsum(0).int().cuda()
        lens = torch.tensor(kv_lens, dtype=torch.int32, device="cuda")
        given = {"q_starts": starts, "max_kv_len": self.kv_len + 5, "backend": "hopper"}
        tables = table.expand(len(kv_lens), count)
        return indexer_logits(self.q, self.weights, self.cache, tables, lens, **given)


@pytest.mark.gpu
@pytest.mark.parametrize("q_lens", [(1,), (2, 1), (4,), (9, 1)], ids=str)
def test_a_million_keys(q_lens):
    kv_len = 2**20 + 70
    batch = Repeated(sum(q_lens), kv_len)
    logits = batch.logits((kv_len,) * len(q_lens), q_lens)
    first = batch.logits((192 + max(q_lens),) * len(q_lens), q_lens)[:, :192]
    periods = kv_len // 192
    many = logits[:, : periods * 192].view(len(logits), periods, 192)[:, :-1]
    assert torch.equal(many, first[:, None].expand_as(many))
    assert bool(logits[:, kv_len:].isneginf().all())
    token = 0
    for q_len in q_lens:
        for position in range(kv_len - q_len, kv_len):
            assert bool(logits[token, : position + 1].isfinite().all())
            assert bool(logits[token, position + 1 :].isneginf().all())
            token += 1


@pytest.mark.gpu
def test_negative_scales_count_as_zero():
    batch = Repeated(2, 192)
    scales = batch.cache.layer(0).scales
    assert scales is not None
    scales[0, 5] = -1.0
    scales[2, 0] = torch.nan
    for kv_lens, q_lens in (((192,), (2,)), ((192, 192), (1, 1))):
        logits = batch.logits(kv_lens, q_lens)
        assert torch.equal(logits[:, 5], torch.zeros(2, device="cuda"))
        assert bool(logits[:, 128].isnan().all())
        assert int(logits.isnan().sum()) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("q_lens", [(1,), (1, 1, 1), (3,), (40, 1, 9)], ids=str)
def test_a_graph_and_a_recorded_launch_follow_the_lengths(q_lens):
    batch, tokens = len(q_lens), sum(q_lens)
    pages = torch.zeros(40, 64, 132, dtype=torch.uint8, device="cuda")
    cache = PagedLatentCache.wrap_index_keys(pages)
    cache.layer(0).write(torch.arange(2560, device="cuda"), torch.randn(2560, 128, device="cuda"))
    table = torch.randperm(40, device="cuda")[:36].view(1, 36).expand(batch, 36).int()
    q = torch.randn(tokens, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(tokens, 64, device="cuda")
    starts = torch.tensor([0, *q_lens]).cumsum(0).int().cuda()
    kv_lens = torch.full((batch,), 2000, dtype=torch.int32, device="cuda")
    out = torch.empty(tokens, 2304, device="cuda")

    def call(**given: object) -> torch.Tensor:
        fixed = {"q_starts": starts, "max_kv_len": 2304, "backend": "hopper"}
        return indexer_logits(q, weights, cache, table, kv_lens, **fixed, **given)

    first = call(out=out).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(out=out)
    for lengths in ((50,), (2304,), (64, 1000, 41), (2000,)):
        lens = [lengths[i % len(lengths)] for i in range(batch)]
        kv_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        with knobs.override(launch_cache=False):
            want = call()
        assert torch.equal(out, want)
        for _ in range(3):  # from the third call on of the recorded launch
            assert torch.equal(call(), want)
    assert torch.equal(out, first)
