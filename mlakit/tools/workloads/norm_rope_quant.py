"""Cases of `norm_rope_quant_append`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import KVShard, PageTable
from mlakit.dispatch.knobs import Backend
from mlakit.formats import RowCodec
from mlakit.model.geometry import Rope
from mlakit.ops import norm_rope_quant_append
from mlakit.tools.testing import NEVER_A_PAGE, assert_matches
from mlakit.tools.workloads.case import Results, Trial, assert_given
from mlakit.tools.workloads.inputs import DTYPES, Inputs
from mlakit.tools.workloads.paged import PagedCase, Pool, map_tokens, num_pages_for, starts_of

E4M3 = torch.float8_e4m3fn
SPARE_POSITIONS = 2  # rows of the rope table beyond the last position


@dataclass(frozen=True, eq=False)
class Step:
    """The new tokens of a step, as copies for the oracle."""

    q_rope: Tensor
    kv: Tensor
    freqs: Tensor
    gamma: Tensor | None
    positions: Sequence[int]
    slots: Tensor  # int64 [tokens]; -1: no row is written


@dataclass(frozen=True, kw_only=True, repr=False)
class AppendCase(PagedCase):
    """One call of `norm_rope_quant_append` on a poisoned cache.

    kv_lens   cached tokens of each request, including its q_lens new ones
    slots     how the op gets the destination of tokens: "" by page table and lengths, "all" by
              slots and positions, "some" the same with slot -1 for some tokens, whose positions may
              be outside of freqs
    positions rows of freqs of tokens by page table: "" their positions, "given" other ones
    rank      of `world` ranks of a context-parallel group: tokens of others are not stored, and
              slots of others are garbage
    dtype     of q_rope and kv; freqs_dtype and gamma_dtype of the tables; "" for no gamma
    q_out     destination of the rotated queries: "" a new tensor, "in_place", or a given tensor of
              q's dtype ("given") or of e4m3 ("e4m3")
    """

    op = "norm_rope_quant_append"

    kv_lens: tuple[int, ...] = (17, 3, 4)
    q_lens: tuple[int, ...] = (2, 3, 0)
    implicit_starts: bool = False
    heads: int = 3
    dtype: str = "bf16"
    freqs_dtype: str = "fp32"
    gamma_dtype: str = "bf16"
    epsilon: float = 1e-3
    rope: Rope = "interleaved"
    flat_table: bool = False
    slots: str = ""
    positions: str = ""
    rank: int = 0
    world: int = 1
    interleave: int = 1
    q_out: str = ""

    def trial(self, device: torch.device | str) -> Trial:
        inputs = Inputs(device, self.seed, padded=self.padded)
        tokens, row = sum(self.q_lens), self.row
        # tokens of all magnitudes: epsilon matters for the smallest, the largest saturate e4m3
        size = inputs.uniform(-6, 11, tokens, 1).exp2()
        q_rope = inputs.normal(tokens, self.heads, row.qk_rope_head_dim) * size[:, None]
        kv = inputs.normal(tokens, row.width) * size
        tensors = {
            "q_rope": inputs.place("q_rope", q_rope, self.dtype),
            "kv": inputs.place("kv", kv, self.dtype),
        }
        positions = self._rope_positions(inputs)
        tensors["freqs"] = inputs.place("freqs", self._freqs(positions), self.freqs_dtype)
        gamma = None
        if self.gamma_dtype:
            weight = inputs.uniform(0.5, 2.0, row.kv_lora_rank)
            gamma = inputs.place("gamma", weight, self.gamma_dtype)
        pool, table, slots = self._cache(inputs)
        if self.slots == "some":
            slots, positions = _with_skipped(inputs, slots, positions, len(tensors["freqs"]))
        pool.allow(slots[slots >= 0])
        step = Step(
            **{name: tensor.cpu().clone() for name, tensor in tensors.items()},
            gamma=None if gamma is None else gamma.cpu().clone(),
            positions=positions,
            slots=slots,
        )
        where = self._where(inputs, table, step)
        q_out = self._q_out(inputs, tensors["q_rope"])

        def call(backend: Backend) -> Results:
            rotated = norm_rope_quant_append(
                **tensors,
                gamma=gamma,
                cache=pool.cache,
                **where,
                epsilon=self.epsilon,
                layer=pool.layer_index,
                rope=self.rope,
                kv_shard=self.shard if self.world > 1 else None,
                q_rope_out=q_out,
                power_of_two_scales=self.power_of_two,
                backend=backend,
            )
            return (rotated,)

        def check(results: Results) -> None:
            assert_given("q_rope_out", results[0], q_out)
            self._check(step, pool, results[0].cpu())

        return Trial(inputs, call, check)

    @property
    def shard(self) -> KVShard:
        """The tokens that are stored."""
        return KVShard(self.rank, self.world, self.interleave)

    def _rope_positions(self, inputs: Inputs) -> list[int]:
        """The rows of freqs of the new tokens."""
        positions = reference.append_positions(self.kv_lens, self.q_lens)
        if not self.positions:
            return positions
        others: list[int] = inputs.integers(0, 40, len(positions)).tolist()
        return others

    def _freqs(self, positions: Sequence[int]) -> Tensor:
        """[positions, D_R] float32, NaN at positions without a new token."""
        d_r = self.row.qk_rope_head_dim
        used = sorted(set(positions))
        freqs = torch.full(
            (max(used, default=0) + 1 + SPARE_POSITIONS, d_r),
            torch.nan,
            dtype=torch.float32,
            device="cpu",
        )
        angle = torch.tensor(used, dtype=torch.float32, device="cpu")[:, None] * 100.0 ** (
            -torch.arange(0, d_r, 2, dtype=torch.float32, device="cpu") / max(d_r, 1)
        )
        freqs[used] = torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(1)
        return freqs

    def _cache(self, inputs: Inputs) -> tuple[Pool, PageTable, Tensor]:
        """The pool, its page table, and the slots of the new tokens."""
        owned, new = [], []  # per request: of all its tokens, and of those of this rank
        for kv_len, q_len in zip(self.kv_lens, self.q_lens, strict=True):
            position = torch.arange(kv_len, device="cpu")
            is_own = self.shard.owner(position) == self.rank
            owned.append(is_own[kv_len - q_len :])
            new.append(position[is_own] >= kv_len - q_len)
        pool = self.pool(inputs, "cache", num_pages_for(list(map(len, new)), self.page_size))
        table, slots = map_tokens(pool, new, flat=self.flat_table, wide=self.wide_indices)
        written = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for is_own, own, tokens in zip(owned, slots, new, strict=True):
            stored = torch.full(is_own.shape, -1, dtype=torch.int64, device="cpu")
            stored[is_own] = own[tokens]
            written.append(stored)
        return pool, table, torch.cat(written)

    def _where(self, inputs: Inputs, table: PageTable, step: Step) -> dict[str, Any]:
        """The arguments for the destination of the new tokens."""

        def place(name: str, values: Sequence[int]) -> Tensor:
            return inputs.place_ints(name, values, wide=self.wide_indices)

        if self.slots:
            position = torch.tensor(step.positions, dtype=torch.int64, device="cpu")
            is_foreign = self.shard.owner(position) != self.rank
            is_foreign &= (position >= 0) & (position < len(step.freqs))
            garbage = inputs.any_of([NEVER_A_PAGE, -1, 0], len(position))
            slots: list[int] = torch.where(is_foreign, garbage, step.slots).tolist()
            return {"slots": place("slots", slots), "positions": place("positions", step.positions)}
        given = {} if not self.positions else {"positions": place("positions", step.positions)}
        return {
            "page_table": table,
            "kv_lens": place("kv_lens", self.kv_lens),
            "q_starts": None if self.implicit_starts else place("q_starts", starts_of(self.q_lens)),
            **given,
        }

    def _q_out(self, inputs: Inputs, q_rope: Tensor) -> Tensor | None:
        if not self.q_out:
            return None
        if self.q_out == "in_place":
            inputs.allow("q_rope", q_rope)
            return q_rope
        dtype = E4M3 if self.q_out == "e4m3" else DTYPES[self.dtype]
        return inputs.result("q_rope_out", q_rope.shape, dtype)

    def _check(self, step: Step, pool: Pool, rotated: Tensor) -> None:
        assert_appended(
            step,
            rotated,
            pool.read(step.slots[step.slots >= 0]),
            pool.cache.codec,
            epsilon=self.epsilon,
            rope=self.rope,
            tensor_scale=self.tensor_scale,
            power_of_two=self.power_of_two,
        )


def _with_skipped(
    inputs: Inputs, slots: Tensor, positions: Sequence[int], num_positions: int
) -> tuple[Tensor, list[int]]:
    """Slots and positions with slot -1 for some tokens, and invalid positions for some of these."""
    skipped = inputs.chance(0.4, len(slots))
    anywhere = inputs.any_of([NEVER_A_PAGE, -1, num_positions, -NEVER_A_PAGE], len(slots))
    lost = skipped & inputs.chance(0.5, len(slots))
    kept = torch.where(lost, anywhere, torch.tensor(positions, dtype=torch.int64, device="cpu"))
    return torch.where(skipped, -1, slots), kept.tolist()


def assert_appended(
    step: Step,
    rotated: Tensor,
    rows: Tensor,
    codec: RowCodec,
    *,
    epsilon: float,
    rope: Rope = "interleaved",
    tensor_scale: float = 1.0,
    power_of_two: bool = False,
) -> None:
    """Assert that a step's rotated queries and written rows match the oracle.

    rotated  [tokens, heads, D_R] on the CPU
    rows     [tokens with a slot, width] as read from the cache, on the CPU
    """
    written = step.slots >= 0
    tensors = (step.q_rope, step.kv, step.freqs, step.gamma, step.positions)
    exact_q, exact_rows = reference.norm_rope_quant(*tensors, epsilon=epsilon, rope=rope)
    naive_q, naive_rows = reference.norm_rope_quant_stepwise(
        *tensors, epsilon=epsilon, rope=rope, out_dtype=rotated.dtype, cache_dtype=torch.float32
    )
    assert_matches("q_rope_out", rotated, exact_q, naive_q)
    exact_rows, naive_rows = exact_rows[written], naive_rows[written]
    encoded = codec.encode(naive_rows, tensor_scale=tensor_scale, power_of_two=power_of_two)
    stored = codec.decode(*encoded, tensor_scale=tensor_scale)
    assert_matches("cache rows", rows, exact_rows, stored)
    normed = torch.float32 if step.gamma is None else step.gamma.dtype
    assert_quantised_alike(codec, rows, stored, normed)


def assert_quantised_alike(
    codec: RowCodec, actual: Tensor, expected: Tensor, normed: torch.dtype
) -> None:
    """Assert that rows read from a cache equal `expected` except for rare rounding flips.

    A norm summed in another order differs in the last bit of float32. If the next rounding was a
    near tie, the element differs by one step of the stored type or of γ's type, `normed`. Several
    flips in a row are an error: an error common to the row, however small, flips many elements.
    """
    is_float = codec.payload_dtype in (torch.bfloat16, torch.float16, torch.float32)
    latent = codec.payload_dtype if is_float else E4M3
    rope = torch.bfloat16 if codec.payload_dtype == torch.uint8 else latent
    row = codec.row
    epsilon = torch.tensor(
        [max(torch.finfo(dtype).eps for dtype in (latent, normed))] * row.kv_lora_rank
        + [torch.finfo(rope).eps] * row.qk_rope_head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    size = expected.abs()
    # the subnormals of e4m3 are 2**-18 of its largest number apart
    step = torch.maximum(epsilon * size, size.amax(-1, keepdim=True) * 2.0**-17)
    error = (actual - expected).abs()
    flipped = error > 32 * torch.finfo(torch.float32).eps * size
    for label, wrong in (
        ("is more than one step off", (error > step).any(-1)),
        ("has several elements rounded elsewhere", flipped.sum(-1) > 1 + row.width // 64),
    ):
        if bool(wrong.any()):
            where = int(wrong.nonzero()[0])
            raise AssertionError(
                f"cache rows: {int(wrong.sum())} of {len(wrong)} wrong, the first, {where}, {label}"
            )
