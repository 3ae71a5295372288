"""A serving loop: continuous batching over one paged latent cache.

A small MLA model with random weights serves requests that arrive at different steps. Every step
takes some new tokens of some requests, at most `--budget` in all, and runs them as one batch:

chunked prefill  a long prompt is split over steps, and the others decode in the same batch
prefix sharing   a prompt that begins like a cached sequence takes over its pages (`fork`); the
                 last page, partly filled, is copied when one of the two writes into it
preemption       if no page is free, the newest request gives up its pages and waits; later its
                 tokens are computed again
prefix cache     pages of finished requests stay until others need them

    python examples/serving_loop.py --check
    python examples/serving_loop.py --device cuda --requests 64 --pages 256 --budget 512

The table has the steps in which something other than decoding happens. With `--check`, plain torch
computes the tokens of each request alone, without a cache, and the exit status is 1 if any token
differs.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mlakit
from mlakit import OutOfPagesError, PagedSequence

VOCABULARY, LAYERS, MAX_POSITIONS = 512, 2, 4096
PAGE_SIZE = 16
GEOMETRY = mlakit.MLAGeometry(
    num_heads=4,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    hidden_size=128,
    q_lora_rank=96,
)


class Block(nn.Module):
    """Attention and a gated MLP, each after an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        hidden = GEOMETRY.hidden_size
        self.attention = mlakit.MLAAttention(GEOMETRY, max_positions=MAX_POSITIONS)
        self.before_attention, self.before_mlp = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.gate_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Model(nn.Module):
    """Token ids to logits. Attention is the only part that sees more than one token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, GEOMETRY.hidden_size)
        self.stack = [Block() for _ in range(LAYERS)]
        self.blocks = nn.ModuleList(self.stack)  # registers their parameters
        self.norm = nn.RMSNorm(GEOMETRY.hidden_size)
        self.head = nn.Linear(GEOMETRY.hidden_size, VOCABULARY, bias=False)

    def forward(
        self, ids: Tensor, batch: mlakit.CachedBatch, kv_lens: list[int], q_lens: list[int]
    ) -> Tensor:
        """The logits [requests, vocabulary] after the last new token of each request."""
        plan = mlakit.plan_step(kv_lens, q_lens)  # who decodes, who prefills: for all layers
        x = self.embedding(ids)
        for number, block in enumerate(self.stack):
            # one pool for all layers: the page table is the same, the layer's number is not
            here = mlakit.CachedBatch(
                batch.cache, batch.page_table, batch.kv_lens, batch.q_starts, number
            )
            x = x + block.attention(block.before_attention(x), here, plan=plan)
            x = x + block.mlp(x)
        last = (batch.q_starts[1:] - 1).long()
        logits: Tensor = self.head(self.norm(x[last]))
        return logits


@dataclass(eq=False)
class Request:
    """A prompt, and the tokens that were generated for it."""

    name: str
    arrival: int  # step
    tokens: list[int]  # the prompt, then what was generated
    prompt_length: int
    max_new_tokens: int
    sequence: PagedSequence | None = None  # None while it waits
    preemptions: int = 0

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]


@dataclass
class Counts:
    """What the loop did."""

    steps: int = 0
    computed: int = 0  # tokens that went through the model
    shared: int = 0  # tokens whose rows were in the cache already
    preemptions: int = 0
    copied_pages: int = 0
    events: list[str] = field(default_factory=list)  # of the current step


class Scheduler:
    """Decides which tokens are computed in a step, and keeps the pages."""

    def __init__(self, cache: mlakit.PagedLatentCache, budget: int) -> None:
        self.cache, self.budget = cache, budget
        self.pages = mlakit.PageAllocator(cache.num_pages, cache.page_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.finished: dict[PagedSequence, list[int]] = {}  # the prefix cache, oldest first
        self.counts = Counts()

    def submit(self, request: Request) -> None:
        # its last token is never cached: nothing follows it
        longest = request.prompt_length + request.max_new_tokens - 1
        if longest > self.pages.num_pages * self.pages.page_size:
            raise ValueError(f"request {request.name} does not fit into the pool")
        self.waiting.append(request)
        self.counts.events.append(f"{request.name} arrives ({request.prompt_length})")

    def schedule(self) -> dict[Request, int]:
        """The new tokens of each request in this step; their pages are reserved."""
        # rows of this step do not exist yet: only these many of a sequence can be shared
        cached = {each: each.sequence.length for each in self.running if each.sequence}
        step: dict[Request, int] = {}
        preempted = self.counts.preemptions
        for request in [*self.running]:
            if request.sequence is None:  # preempted by an older one in this loop
                continue
            count = min(len(request.tokens) - request.sequence.length, self._left(step))
            while count and not self._append(request.sequence, count):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    count = 0
            if count:
                step[request] = count
        while self.waiting and self._left(step) and self.counts.preemptions == preempted:
            if not self._admit(self.waiting[0], step, cached):
                break
        return step

    def _left(self, step: dict[Request, int]) -> int:
        return self.budget - sum(step.values())

    def _admit(
        self, request: Request, step: dict[Request, int], cached: dict[Request, int]
    ) -> bool:
        """Start the first waiting request, if there are pages for all its tokens."""
        sequence, shared = self._longest_prefix(request, cached)
        size = self.pages.page_size
        needed = -(-len(request.tokens) // size) - shared // size
        while self.pages.num_free_pages < needed and self._evict():
            pass
        count = min(len(request.tokens) - shared, self._left(step))
        if self.pages.num_free_pages < needed or not self._append(sequence, count):
            self.pages.free(sequence)
            return False
        request.sequence = sequence
        self.waiting.popleft()
        self.running.append(request)
        step[request] = count
        self.counts.shared += shared
        again = " again" if request.preemptions else ""
        prefix = f", {shared} tokens shared" if shared else ""
        self.counts.events.append(f"{request.name} starts{again}{prefix}")
        return True

    def _longest_prefix(
        self, request: Request, cached: dict[Request, int]
    ) -> tuple[PagedSequence, int]:
        """A new sequence that shares the longest cached prefix, and the prefix's length."""
        known = [
            (each.sequence, each.tokens[:length])
            for each, length in cached.items()
            if each.sequence
        ]
        best, shared = None, 0
        for sequence, tokens in (*known, *self.finished.items()):
            # the last token is always computed: its logits are what follows
            length = common_prefix(tokens, request.tokens[:-1])
            if length > shared:
                best, shared = sequence, length
        if best is None:
            return self.pages.reserve(0), 0
        return self.pages.fork(best, shared), shared

    def _append(self, sequence: PagedSequence, count: int) -> bool:
        """Reserve the pages of new tokens; False if there are too few."""
        while True:
            try:
                copies = self.pages.append(sequence, count)
            except OutOfPagesError:
                if not self._evict():
                    return False
                continue
            # before any row of the step is written
            self.cache.copy_pages(copies)
            self.counts.copied_pages += len(copies)
            return True

    def _evict(self) -> bool:
        """Drop the oldest sequence of the prefix cache; False if there is none."""
        oldest = next(iter(self.finished), None)
        if oldest is None:
            return False
        self.pages.free(oldest)
        del self.finished[oldest]
        return True

    def _preempt(self, request: Request) -> None:
        assert request.sequence is not None
        self.pages.free(request.sequence)
        request.sequence = None
        request.preemptions += 1
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.counts.preemptions += 1
        self.counts.events.append(f"{request.name} preempted")

    def finish(self, request: Request) -> None:
        """Its pages stay in the prefix cache until they are needed."""
        assert request.sequence is not None
        self.running.remove(request)
        self.finished[request.sequence] = request.tokens[: request.sequence.length]
        self.counts.events.append(f"{request.name} done")


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def compute(model: Model, scheduler: Scheduler, step: dict[Request, int]) -> None:
    """Run the tokens of a step as one batch; requests without more tokens get their next one."""
    cache, pages = scheduler.cache, scheduler.pages
    q_lens = [*step.values()]
    sequences = [each.sequence for each in step if each.sequence is not None]
    batch = mlakit.CachedBatch(
        cache,
        pages.page_table(sequences, device=cache.device),
        pages.kv_lens(sequences, device=cache.device),
        torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32).to(cache.device),
    )
    new = [
        token
        for (request, count), sequence in zip(step.items(), sequences, strict=True)
        for token in request.tokens[sequence.length - count : sequence.length]
    ]
    kv_lens = [each.length for each in sequences]
    logits = model(torch.tensor(new).to(cache.device), batch, kv_lens, q_lens)
    for request, sequence, token in zip(step, sequences, logits.argmax(-1).tolist(), strict=True):
        if sequence.length < len(request.tokens):
            continue  # a chunk that is not the last
        request.tokens.append(token)
        if len(request.generated) == request.max_new_tokens:
            scheduler.finish(request)


def serve(model: Model, requests: Sequence[Request], scheduler: Scheduler) -> None:
    """All requests to their end; prints a line where something other than decoding happens."""
    counts = scheduler.counts
    arriving = deque(sorted(requests, key=lambda each: each.arrival))
    print(f"{'step':>4}{'prefill':>9}{'decode':>8}{'waiting':>9}{'free pages':>12}  events")
    while arriving or scheduler.waiting or scheduler.running:
        counts.events.clear()
        while arriving and arriving[0].arrival <= counts.steps:
            scheduler.submit(arriving.popleft())
        step = scheduler.schedule()
        if step:
            compute(model, scheduler, step)
        if counts.events:
            decode = sum(count == 1 for count in step.values())
            sizes = f"{sum(step.values()) - decode:>9}{decode:>8}{len(scheduler.waiting):>9}"
            free, events = scheduler.pages.num_free_pages, ", ".join(counts.events)
            print(f"{counts.steps:>4}{sizes}{free:>12}  {events}")
        counts.steps += 1
        counts.computed += sum(step.values())


def is_generated_alone(model: Model, request: Request) -> bool:
    """Whether plain torch, given the request alone, generates the same tokens.

    One pass over all tokens is enough: attention is causal, so the logits at each position are
    those of the step in which it was the last.
    """
    x = model.embedding(torch.tensor(request.tokens[:-1], device=model.head.weight.device))
    for block in model.stack:
        x = x + plain_attention(block.attention, block.before_attention(x))
        x = x + block.mlp(x)
    following = model.head(model.norm(x)).argmax(-1).tolist()
    return bool(following[request.prompt_length - 1 :] == request.generated)


def plain_attention(layer: mlakit.MLAAttention, x: Tensor) -> Tensor:
    """Causal MLA of one request in the expanded form, x [tokens, hidden]."""
    g, tokens = GEOMETRY, len(x)
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x)))
    q = q.unflatten(-1, (g.num_heads, g.qk_head_dim))
    latent, k_rope = layer.kv_a_proj_with_mqa(x).split([g.kv_lora_rank, g.qk_rope_head_dim], -1)
    kv = layer.kv_b_proj(layer.kv_a_layernorm(latent))
    kv = kv.unflatten(-1, (g.num_heads, g.qk_nope_head_dim + g.v_head_dim))
    freqs = mlakit.rope_table(g, tokens, device=x.device).unflatten(-1, (-1, 2))
    angles = torch.view_as_complex(freqs)[:, None]  # [tokens, 1, D_R / 2]

    def rotated(part: Tensor) -> Tensor:
        pairs = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * angles).flatten(-2)

    q = torch.cat([q[..., : g.qk_nope_head_dim], rotated(q[..., g.qk_nope_head_dim :])], -1)
    shared = rotated(k_rope[:, None]).expand(-1, g.num_heads, -1)
    k = torch.cat([kv[..., : g.qk_nope_head_dim], shared], -1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * g.softmax_scale
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, kv[..., g.qk_nope_head_dim :])
    projected: Tensor = layer.o_proj(out.flatten(1))
    return projected


def random_requests(count: int, generator: torch.Generator) -> list[Request]:
    """Requests that arrive one after another; two of three begin with the same instructions."""

    def ids(number: int) -> list[int]:
        return torch.randint(VOCABULARY, (number,), generator=generator).tolist()

    instructions = ids(40)  # not a whole number of pages
    requests = []
    for i in range(count):
        prompt = ids(5 + 7 * (i % 4)) if i % 3 else ids(90)
        prompt = prompt if i % 3 == 0 else instructions + prompt
        new = 8 + 5 * (i % 5)
        requests.append(Request(f"r{i}", 3 * i, prompt, len(prompt), new))
    return requests


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=9)
    parser.add_argument("--pages", type=int, default=18, help=f"of {PAGE_SIZE} tokens")
    parser.add_argument("--budget", type=int, default=32, help="new tokens of a step")
    parser.add_argument("--check", action="store_true", help="compare with plain torch")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)

    device = torch.device(options.device)
    model = Model().to(device)
    # float32, so that rounding does not decide between two tokens; models are served in bf16 or fp8
    cache = mlakit.PagedLatentCache.allocate(
        GEOMETRY,
        "fp32",
        num_pages=options.pages,
        page_size=PAGE_SIZE,
        num_layers=LAYERS,
        device=device,
    )
    requests = random_requests(options.requests, torch.Generator().manual_seed(0))
    scheduler = Scheduler(cache, options.budget)
    with torch.inference_mode():
        serve(model, requests, scheduler)
    done = scheduler.counts
    needed = sum(len(each.tokens) - 1 for each in requests)
    print(f"{len(requests)} requests, {done.steps} steps, {needed} tokens to cache:")
    print(f"  computed {done.computed}, shared {done.shared}, pages copied {done.copied_pages}")
    print(f"  preemptions {done.preemptions}")
    if not options.check:
        return 0
    with torch.inference_mode():
        wrong = [each.name for each in requests if not is_generated_alone(model, each)]
    print(f"DIFFERENT tokens alone: {', '.join(wrong)}" if wrong else "the same tokens alone")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
