"""The suite `norm-rope-quant`: appends one step's new tokens to the cache, on a GPU.

Against  a copy of the same bytes, an empty kernel, and separate torch.compile functions
Bytes    q_rope read and written, the raw latents read, the cache rows written
Check    the rotated queries and the rows written, against the float64 oracle
Target   2x of the separate functions
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.formats import Format, row_codec
from mlakit.model.rope import rope_table
from mlakit.ops import norm_rope_quant_append
from mlakit.tools.bench import gpu
from mlakit.tools.bench.pool import MODEL, ROW
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload
from mlakit.tools.workloads.norm_rope_quant import Step, assert_appended

D_C, D_R = ROW.kv_lora_rank, ROW.qk_rope_head_dim
EPSILON = 1e-6
MAX_CHECKED = 64  # tokens


@dataclass(frozen=True)
class Append(Workload):
    """`tokens` requests with one new token each, or one request with all of them (`is_prompt`)."""

    tokens: int
    format: Format = "bf16"
    heads: int = 128
    is_prompt: bool = False
    page_size: int = 64

    op = "norm_rope_quant_append"
    traffic = "copy"

    @property
    def name(self) -> str:
        kind = "prompt" if self.is_prompt else "decode"
        return f"append-{self.format}-{kind}-{self.tokens}-h{self.heads}"

    @property
    def flops(self) -> int:
        return self.tokens * (3 * (self.heads + 1) * D_R + 4 * D_C)

    @property
    def bytes(self) -> int:
        queries = 2 * 2 * self.heads * D_R
        return self.tokens * (queries + 2 * ROW.width + row_codec(self.format, ROW).bytes_per_token)

    @property
    def min_speedup(self) -> float | None:
        return 2.0 if self.format == "bf16" else None

    @property
    def small(self) -> Append:
        return replace(self, tokens=min(self.tokens, 3))

    def build_case(self) -> BenchmarkCase:
        generator = gpu.generator()
        q_rope = gpu.normal(generator, self.tokens, self.heads, D_R)
        kv = gpu.normal(generator, self.tokens, ROW.width)
        gamma, rotated = gpu.normal(generator, D_C), torch.empty_like(q_rope)
        freqs = rope_table(MODEL, self.tokens if self.is_prompt else 1, device=gpu.DEVICE)
        pages_each = -(-self.tokens // self.page_size) if self.is_prompt else 1
        batch = 1 if self.is_prompt else self.tokens
        cache = PagedLatentCache.allocate(
            ROW,
            self.format,
            num_pages=batch * pages_each,
            page_size=self.page_size,
            device=gpu.DEVICE,
        )
        order = torch.randperm(batch * pages_each, generator=generator, device=gpu.DEVICE)
        page_table = order.int().view(batch, pages_each)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=gpu.DEVICE)
        starts = starts * (self.tokens // batch)
        kv_lens = starts.diff()  # nothing was cached before

        def call() -> Tensor:
            return norm_rope_quant_append(
                q_rope,
                kv,
                freqs,
                gamma,
                cache,
                page_table,
                kv_lens,
                starts,
                epsilon=EPSILON,
                q_rope_out=rotated,
            )

        token = torch.arange(self.tokens, device=gpu.DEVICE)
        position = token if self.is_prompt else torch.zeros_like(token)
        request = torch.zeros_like(token) if self.is_prompt else token
        page = page_table[request, position // self.page_size].long()
        slots = page * self.page_size + position % self.page_size

        def check() -> None:
            call()
            checked = slice(0, self.tokens, max(self.tokens // MAX_CHECKED, 1))
            step = Step(
                q_rope=q_rope[checked].cpu(),
                kv=kv[checked].cpu(),
                freqs=freqs.cpu(),
                gamma=gamma.cpu(),
                positions=position[checked].tolist(),
                slots=slots[checked].cpu(),
            )
            rows = cache.layer(0).read(slots[checked]).cpu()
            assert_appended(step, rotated[checked].cpu(), rows, cache.codec, epsilon=EPSILON)

        baselines = [gpu.copy_baseline(self.bytes), gpu.empty_kernel_baseline()]
        if self.format == "bf16":
            steps = _separate_steps(q_rope, kv, freqs, gamma, cache, position, slots)
            baselines.append(Baseline("separate torch.compile", steps))
        return BenchmarkCase(call, baselines, check)


def _separate_steps(
    q_rope: Tensor,
    kv: Tensor,
    freqs: Tensor,
    gamma: Tensor,
    cache: PagedLatentCache,
    position: Tensor,
    slots: Tensor,
) -> Callable[[], None]:
    """The unfused steps of an engine: rotate q, rotate k, normalise, write the row."""
    rows = cache.payload[0].flatten(0, 1)

    def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
        cos, sin = cos_sin.unflatten(-1, (-1, 2)).unbind(-1)
        x0, x1 = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        y = torch.stack([x0 * cos - x1 * sin, x0 * sin + x1 * cos], dim=-1)
        return y.flatten(-2).to(x.dtype)

    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
        return normed.to(x.dtype) * gamma

    def append(latent: Tensor, rope: Tensor) -> None:
        rows[slots] = torch.cat([latent, rope], dim=-1)

    rotate_q, rotate_k = torch.compile(rotate), torch.compile(rotate)
    norm_c, append_row = torch.compile(norm), torch.compile(append)

    def steps() -> None:
        cos_sin = freqs[position]
        rotate_q(q_rope, cos_sin[:, None])
        append_row(norm_c(kv[:, :D_C]), rotate_k(kv[:, D_C:], cos_sin))

    return steps


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = shape.accept("norm-rope-quant", "heads", "format", "page_size")
    tokens, is_prompt = _new_tokens(shape.batch)
    return (Append(tokens, is_prompt=is_prompt, **given),)  # type: ignore[arg-type]


def _new_tokens(batch: Batch) -> tuple[int, bool]:
    """(tokens, is it one prompt?). Raises ValueError for several prompts."""
    if batch.is_even and batch.q_lens[0] == 1:
        return batch.size, False
    if batch.size == 1:
        return batch.tokens, True
    raise ValueError(
        "--shape must be requests with one new token, such as 128q1s1, or one prompt, such as "
        f"1q4ks4k, for norm-rope-quant, got {batch}"
    )


WORKLOADS: tuple[Workload, ...] = (
    *(Append(tokens) for tokens in (1, 16, 128)),
    Append(128, "fp8_block128"),
    *(Append(4096, format, is_prompt=True) for format in ("bf16", "fp8", "fp8_block128")),
)
