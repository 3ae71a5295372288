"""`compress_rows` against the oracle among poison, and over the steps of a request."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mlakit import PageAllocator, PagedLatentCache, RowShape, compress_rows
from mlakit.dispatch import selection
from mlakit.formats import FORMATS
from mlakit.tools.testing import assert_same_bits, poison
from mlakit.tools.workloads import CompressCase
from tests.ops.random_cases import problems_of

each_kernel = pytest.mark.parametrize("spec", selection.specs("compress_rows"), ids=str)
RATES = [(4, True), (8, False), (3, True), (1, False)]
WIDTH, ROPE = 12, 4
# pools of index keys, as GLM-5.3-Flash has them: tokens 0 to 2 and 8 to 10 have the same slots
RING = {
    "rate": 4,
    "overlap": False,
    "normed": False,
    "rotated": False,
    "state_page_size": 8,
    "state_repeats": 8,
}
STATE_PAGE = 4
TOKENS = 43


@pytest.fixture
def backend(spec, device):
    if spec.backend == "cpu" and device.type != "cpu":
        pytest.skip("the CPU kernels take CPU tensors only")
    return spec.backend


@each_kernel
@pytest.mark.parametrize("format", FORMATS)
def test_rows_among_poison(format, backend, device):
    row = {"format": format, "page_size": 3, "num_layers": 2, "wide_indices": True}
    CompressCase(**row, padded=True, keep=2).run(device, backend)


@each_kernel
@pytest.mark.parametrize("power_of_two", [False, True])
def test_index_keys_among_poison(power_of_two, backend, device):
    """Half of the columns are rotated, in rows without rope columns."""
    row = {"kv_lora_rank": 128, "qk_rope_head_dim": 0, "format": "fp8_token", "page_size": 4}
    CompressCase(**row, angles=64, power_of_two=power_of_two).run(device, backend)


@pytest.mark.slow
@each_kernel
@pytest.mark.parametrize(
    "case",
    [
        CompressCase(rate=128, overlap=False, kv_lens=(128, 129, 300), q_lens=(4, 1, 200)),
        CompressCase(rate=3, kv_lens=(3, 6, 10), q_lens=(1, 4, 10), state_page_size=7),
        CompressCase(rate=7, overlap=False, kv_lens=(20, 7), q_lens=(13, 1), state_page_size=1),
        CompressCase(rate=1, kv_lens=(5, 1), q_lens=(2, 1)),
        CompressCase(kv_lens=(4, 8, 3), q_lens=(1, 1, 1), implicit_starts=True),
        CompressCase(kv_lens=(), q_lens=()),
        CompressCase(kv_lens=(9, 4), q_lens=(0, 0)),
        CompressCase(keep=30, kv_lens=(40, 9), q_lens=(35, 2)),
        CompressCase(flat_table=True, wide_indices=True),
        CompressCase(rotated=False, dtype="fp32", format="fp32"),
        CompressCase(kv_lora_rank=36, qk_rope_head_dim=6, padded=True, gamma_dtype="bf16"),
        CompressCase(normed=False, kv_lora_rank=36, qk_rope_head_dim=6),
        CompressCase(**RING, kv_lens=(11, 15, 66), q_lens=(8, 5, 66)),
    ],
    ids=[
        *("rate 128", "rate 3", "rate 7", "rate 1", "one token each", "no requests"),
        *("no tokens", "keeps all", "flat tables", "no rope, float32", "odd widths"),
        *("no norm", "pages of states that repeat"),
    ],
)
def test_corners(case, backend, device):
    case.run(device, backend)


class Request:
    """One request with a pool of its own; states that no later step reads are lost."""

    def __init__(self, device, backend, rate, overlap, *, keep=0):
        generator = torch.Generator().manual_seed(rate)
        columns = (1 + overlap) * WIDTH
        self.rate, self.overlap, self.keep = rate, overlap, keep
        self.device, self.backend = device, backend
        bias, gamma, freqs = (
            torch.randn(shape, generator=generator)
            for shape in ((rate, columns), (WIDTH,), (TOKENS, ROPE))
        )
        self.weights = [tensor.to(device) for tensor in (bias, gamma, freqs)]
        self.tokens = torch.randn(2, TOKENS, columns, generator=generator).to(device)
        windows = TOKENS // rate
        self.cache = self._pool(RowShape(WIDTH - ROPE, ROPE), windows, 3)
        self.state = self._pool(RowShape(2 * columns, 0), -(-TOKENS // STATE_PAGE), STATE_PAGE)
        self.table, self.states = (
            torch.randperm(pool.num_pages, generator=generator).int()[None]
            for pool in (self.cache, self.state)
        )

    def _pool(self, row, num_pages, page_size):
        pool = PagedLatentCache.allocate(
            row, "fp32", num_pages=num_pages, page_size=page_size, device=self.device
        )
        poison(pool.payload)
        return pool

    def first_needed(self, length):
        return max((length // self.rate - self.overlap) * self.rate, 0)

    def step(self, first, last, *, tokens=None):
        """Add tokens [first, last); pages of which nothing is read or stored are not there."""
        kv, gate = (self.tokens if tokens is None else tokens)[:, first:last]
        read, stored = self.first_needed(first), self.first_needed(last - self.keep)
        states = self.states.clone()
        for page in range(states.shape[1]):
            low, high = page * STATE_PAGE, (page + 1) * STATE_PAGE
            is_read = high > read and low < first
            is_stored = high > max(stored, first) and low < last
            if not is_read and not is_stored:
                poison(self.state.payload[0, states[0, page]])
                states[0, page] = -1
        compress_rows(
            *(kv, gate, *self.weights, self.cache, self.table.to(self.device)),
            *(self.state, states.to(self.device)),
            kv_lens=torch.tensor([last], dtype=torch.int32, device=self.device),
            q_starts=torch.tensor([0, last - first], dtype=torch.int32, device=self.device),
            rate=self.rate,
            overlap=self.overlap,
            keep=self.keep,
            epsilon=1e-6,
            backend=self.backend,
        )

    def rows(self, length):
        return self.cache.layer(0).read_tokens(
            self.table.to(self.device), 0, 0, length // self.rate
        )


def at_once(*arguments):
    request = Request(*arguments)
    request.step(0, TOKENS)
    return request.rows(TOKENS)


@pytest.mark.slow
@each_kernel
@pytest.mark.parametrize(("rate", "overlap"), RATES)
@pytest.mark.parametrize("cuts", [[1, 2, 17, 40], [7, 8, 9, 10, 33], [*range(1, TOKENS)]], ids=str)
def test_any_split_of_a_prompt_gives_the_same_bits(cuts, rate, overlap, backend, device):
    request = Request(device, backend, rate, overlap)
    for first, last in pairwise([0, *cuts, TOKENS]):
        request.step(first, last)
    rows = request.rows(TOKENS)
    assert rows.isfinite().all()
    assert_same_bits("rows", rows, at_once(device, backend, rate, overlap))


@pytest.mark.slow
@each_kernel
@pytest.mark.parametrize(("rate", "overlap"), RATES)
def test_rejected_drafts_are_taken_back(rate, overlap, backend, device):
    """Steps of one token and three drafts, of which 0 to 3 are rejected and come again."""
    request = Request(device, backend, rate, overlap, keep=3)
    request.step(0, 6)
    length, rejected = 6, 0
    while length < TOKENS:
        last = min(length + 4, TOKENS)
        rejected = min((rejected + 1) % 4, last - length - 1)
        drafts = request.tokens.clone()
        drafts[:, last - rejected :] *= -2
        request.step(length, last, tokens=drafts)
        length = last - rejected
    assert_same_bits("rows", request.rows(TOKENS), at_once(device, backend, rate, overlap))


@each_kernel
def test_forks_share_their_states(backend, device):
    """Two sequences with the same first ten tokens; each has the rows of its own tokens."""
    whole = Request(device, backend, 4, True)
    expected = at_once(device, backend, 4, True)
    lanes = [PageAllocator(9, page) for page in (2, STATE_PAGE)]
    cache = whole._pool(whole.cache.row, 9, 2)
    state = whole._pool(whole.state.row, 9, STATE_PAGE)

    def step(sequences, tokens):
        tables = [
            lane.page_table(each, device=device)
            for lane, each in zip(lanes, sequences, strict=True)
        ]
        kv_lens = lanes[1].kv_lens(sequences[1], device)
        counts = [part.shape[1] for part in tokens]
        starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
        kv, gate = torch.cat(tokens, dim=1)
        compress_rows(
            *(kv, gate, *whole.weights, cache, tables[0], state, tables[1], kv_lens, starts),
            rate=4,
            overlap=True,
            epsilon=1e-6,
            backend=backend,
        )
        return tables

    first = [lane.reserve(count) for lane, count in zip(lanes, (2, 10), strict=True)]
    step([[each] for each in first], [whole.tokens[:, :10]])
    both = [[each, lane.fork(each)] for lane, each in zip(lanes, first, strict=True)]
    for lane, pair, pool, count in zip(lanes, both, (cache, state), (1, 3), strict=True):
        pool.copy_pages(lane.append_batch(pair, [count, count]))
    mine = whole.tokens[:, 10:13]
    tables = step(both, [mine, -mine])
    rows = [cache.layer(0).read_tokens(tables[0], request, 0, 3) for request in range(2)]
    assert_same_bits("rows", rows[0], expected[:3])
    assert_same_bits("shared rows", rows[1][:2], expected[:2])
    assert not torch.equal(rows[1][2], expected[2])


@pytest.mark.slow
@problems_of("compress_rows")
def test_problems_match_the_oracle(problem, device, pytestconfig):
    problem(device, pytestconfig.getoption("--hypothesis-seed"))
