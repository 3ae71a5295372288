"""Decode steps in CUDA graphs: one graph for each batch size, replayed with other requests.

Layers of MLA with random weights decode batches that change from step to step. A graph has fixed
tensors: a step copies its inputs into them and replays the smallest graph with room for its
requests. The rest of that graph's rows are padding. All layers share one split-KV plan, which is
made on the device inside of the graph, so that each replay plans from the lengths at that time.

    python examples/cuda_graph.py
    python examples/cuda_graph.py --steps 100 --batches 1 2 4 8 16 32

Each step is compared with the same layers called without a graph and without padding; the exit
status is 1 if a result differs. On a CPU the same step runs without graphs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import mlakit

LAYERS, PAGE_SIZE, MAX_PAGES = 3, 16, 12
GEOMETRY = mlakit.MLAGeometry(
    num_heads=4,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    hidden_size=128,
)


@dataclass(frozen=True)
class Step:
    """One new token for each of some requests; in a graph, its fixed tensors."""

    x: Tensor  # [requests, hidden]
    page_table: Tensor  # [requests, MAX_PAGES] int32
    kv_lens: Tensor  # [requests] int32, the new token included
    q_starts: Tensor  # [requests + 1] int32

    @classmethod
    def of_padding(cls, size: int, device: torch.device) -> Step:
        return cls(
            torch.zeros(size, GEOMETRY.hidden_size, device=device),
            torch.full((size, MAX_PAGES), -1, dtype=torch.int32, device=device),
            torch.zeros(size, dtype=torch.int32, device=device),
            torch.zeros(size + 1, dtype=torch.int32, device=device),
        )

    def fill(self, other: Step) -> None:
        """Take the requests of a smaller step. Rows after q_starts[-1] are padding."""
        count = len(other.x)
        self.x[:count] = other.x
        self.page_table[:count] = other.page_table
        self.kv_lens[:count] = other.kv_lens
        self.kv_lens[count:] = 0
        self.q_starts[: count + 1] = other.q_starts
        self.q_starts[count + 1 :] = count


class Model:
    """Layers that share a cache, and a plan in each step."""

    def __init__(self, num_pages: int, device: torch.device) -> None:
        self.layers = [mlakit.MLAAttention(GEOMETRY, max_positions=4096) for _ in range(LAYERS)]
        self.layers = [layer.to(device) for layer in self.layers]
        self.cache = mlakit.PagedLatentCache.allocate(
            GEOMETRY,
            "fp32",
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            num_layers=LAYERS,
            device=device,
        )

    def __call__(self, step: Step) -> Tensor:
        plan = mlakit.plan_mla_decode(
            self.cache,
            step.page_table,
            step.kv_lens,
            heads=GEOMETRY.num_heads,
            q_starts=step.q_starts,
            num_tokens=len(step.x),
        )
        x = step.x
        for number, layer in enumerate(self.layers):
            batch = mlakit.CachedBatch(
                self.cache, step.page_table, step.kv_lens, step.q_starts, number
            )
            x = x + layer(x, batch, plan=plan)
        return x


class Graphs:
    """The steps of a model, captured for some batch sizes."""

    def __init__(self, model: Model, sizes: Sequence[int], device: torch.device) -> None:
        self.captured: dict[int, tuple[Step, Callable[[], Tensor]]] = {}
        # the largest one first: the others then find their memory in the same pool
        for size in sorted(sizes, reverse=True):
            step = Step.of_padding(size, device)
            self.captured[size] = step, self._capture(model, step)

    def _capture(self, model: Model, step: Step) -> Callable[[], Tensor]:
        if step.x.device.type != "cuda":
            return lambda: model(step)
        model(step)  # compiles kernels and prepares weights, which a capture cannot
        graph = torch.cuda.CUDAGraph()
        pool = getattr(self, "pool", None)
        with torch.cuda.graph(graph, pool=pool):
            out = model(step)
        self.pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def __call__(self, step: Step) -> Tensor:
        count = len(step.x)
        size = min(size for size in self.captured if size >= count)
        fixed, replay = self.captured[size]
        fixed.fill(step)
        return replay()[:count].clone()  # the next replay writes there again


def random_step(count: int, pages: Sequence[Sequence[int]], device: torch.device) -> Step:
    """A step of `count` requests at random lengths, each in pages of its own."""
    lens = torch.randint(1, MAX_PAGES * PAGE_SIZE, (count,))
    return Step(
        torch.randn(count, GEOMETRY.hidden_size).to(device),
        torch.tensor(pages[:count], dtype=torch.int32).to(device),
        lens.int().to(device),
        torch.arange(count + 1, dtype=torch.int32).to(device),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device, largest = torch.device(options.device), max(options.batches)
    model = Model(largest * MAX_PAGES, device)
    # as if prompts had filled the cache
    slots = torch.arange(largest * MAX_PAGES * PAGE_SIZE, device=device)
    for number in range(LAYERS):
        rows = torch.randn(len(slots), GEOMETRY.row.width, device=device)
        model.cache.layer(number).write(slots, rows)
    pages = torch.randperm(largest * MAX_PAGES).view(largest, MAX_PAGES).tolist()

    worst = 0.0
    with torch.inference_mode():
        graphs = Graphs(model, options.batches, device)
        for _ in range(options.steps):
            step = random_step(int(torch.randint(1, largest + 1, ())), pages, device)
            difference = graphs(step) - model(step)
            worst = max(worst, difference.abs().max().item())
    kind = "CUDA graphs" if device.type == "cuda" else "no graphs, since there is no GPU"
    sizes = ", ".join(map(str, sorted(options.batches)))
    print(f"{options.steps} steps of up to {largest} requests; batch sizes {sizes}; {kind}")
    print(f"largest difference from steps without padding: {worst:.1e}")
    return 0 if worst < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
