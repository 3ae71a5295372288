"""The portable kernel of `norm_rope_quant_append` writes what the CPU kernel writes, bit for bit.

The sum of squares is the one number whose last bit is a kernel's own affair, because it depends on
the order of the sum. Latents here are small whole numbers times a power of two, so every partial
sum is exact in any order; and all that follows (the division by D_C, the square root, its
reciprocal, both roundings, the scales, the quotients) is rounded to nearest by both kernels. No
tolerance is left to choose. Only the bits of a NaN may differ: its sign and payload mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import ops
from mlakit.cache import UNSHARDED, PagedLatentCache, PageTable, token_positions, token_slots
from mlakit.formats import FORMATS, row_codec
from mlakit.kernels.arguments import AppendArguments
from mlakit.kernels.triton.configs import AppendConfig, pick_append_config
from mlakit.model.geometry import RowShape
from mlakit.tools.workloads.inputs import DTYPES
from tests.pairs import pairwise

E4M3 = torch.float8_e4m3fn
ROPES = ("interleaved", "half")
BYTES = tuple(name for name in FORMATS if name.startswith("fp8_"))
POISON = 0xA5
ODD = RowShape(36, 6)


def real_row(format: str) -> RowShape:
    return RowShape(448, 64, 512) if format == "fp8_block64" else RowShape(512, 64)


@dataclass
class Step:
    """One call, made anew for each backend from the same numbers."""

    format: str = "bf16"
    row: RowShape = ODD
    rope: str = "interleaved"
    q_out: str = "new"
    q_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    freqs_dtype: str = "fp32"
    gamma_dtype: str = "bf16"
    heads: int = 5
    kv_lens: tuple[int, ...] = (17, 3, 4, 8)
    q_lens: tuple[int, ...] = (2, 3, 0, 1)
    page_size: int = 4
    epsilon: float = 1e-6
    flat: bool = False
    slots: tuple[int | None, ...] | None = None  # given; None: as the page table says, -1: none
    positions: tuple[int | None, ...] | None = None  # likewise
    strided: bool = False  # every axis of every argument that may have any stride
    odd_bytes: bool = False  # cache rows that start anywhere
    power_of_two: bool = False
    tensor_scale: float | Tensor = 1.0
    specials: dict[tuple[int, int], float] = field(default_factory=dict)  # of kv

    def run(self, backend: str, device: torch.device) -> tuple[Tensor, PagedLatentCache]:
        """(the rotated queries, the cache) on the CPU; what was not written is poison."""
        generator = torch.Generator().manual_seed(7)
        tokens, batch, d_r = sum(self.q_lens), len(self.q_lens), self.row.qk_rope_head_dim
        size = torch.randint(-7, 8, (tokens, 1), generator=generator).float().exp2()
        whole = torch.randint(-15, 16, (tokens, self.row.width), generator=generator).float()
        q_rope = torch.randn(tokens, self.heads, d_r, generator=generator) * 8 * size[:, None]
        freqs = torch.randn(64, d_r, generator=generator)
        gamma = torch.rand(self.row.kv_lora_rank, generator=generator) + 0.5
        kv = whole * size
        for place, value in self.specials.items():
            kv[place] = value
        q_rope = self._spread(q_rope.to(device, DTYPES[self.q_dtype]), last=False)
        cache, table = self._cache(device, generator)
        assert len(self.kv_lens) == batch
        rotated = ops.norm_rope_quant_append(
            q_rope,
            self._spread(kv.to(device, DTYPES[self.kv_dtype]), last=False),
            self._spread(freqs.to(device, DTYPES[self.freqs_dtype])),
            self._spread(gamma.to(device, DTYPES[self.gamma_dtype])),
            cache,
            **self._where(cache, table, device),
            epsilon=self.epsilon,
            rope=self.rope,
            q_rope_out=self._q_out(q_rope),
            power_of_two_scales=self.power_of_two,
            backend=backend,
        )
        return rotated.cpu(), cache

    def _where(
        self, cache: PagedLatentCache, table: PageTable, device: torch.device
    ) -> dict[str, Any]:
        """The arguments that say where rows go."""
        starts = torch.tensor([0, *accumulate(self.q_lens)], dtype=torch.int32, device=device)
        kv_lens = torch.tensor(self.kv_lens, dtype=torch.int64, device=device)
        if self.slots is None:
            by_request = {"kv_lens": self._spread(kv_lens), "q_starts": self._spread(starts)}
            return {"page_table": table, **by_request}
        request, positions = token_positions(kv_lens, starts, sum(self.q_lens))
        slots = token_slots(table, cache.page_size, request, positions)
        for token, slot in enumerate(self.slots):
            slots[token] = slots[token] if slot is None else slot
        for token, position in enumerate(self.positions or ()):
            positions[token] = positions[token] if position is None else position
        return {"slots": self._spread(slots.int()), "positions": self._spread(positions)}

    def _spread(self, tensor: Tensor, *, last: bool = True) -> Tensor:
        """The same numbers with poison between them."""
        if not self.strided:
            return tensor
        steps = [3] * tensor.ndim if last else [3] * (tensor.ndim - 1) + [1]
        sizes = [size * step for size, step in zip(tensor.shape, steps, strict=True)]
        memory = torch.full(sizes, -1 if tensor.dtype in (torch.int32, torch.int64) else torch.nan)
        spread = memory.to(tensor)[tuple(slice(None, None, step) for step in steps)]
        return spread.copy_(tensor)

    def _cache(
        self, device: torch.device, generator: torch.Generator
    ) -> tuple[PagedLatentCache, PageTable]:
        counts = self.kv_lens
        pages = [-(-count // self.page_size) for count in counts]
        scale = self.tensor_scale
        if isinstance(scale, Tensor):
            scale = scale.to(device)
        cache = PagedLatentCache.allocate(
            self.row,
            self.format,
            num_pages=sum(pages) + 1,
            page_size=self.page_size,
            tensor_scale=scale,
            device=device,
        )
        if self.odd_bytes:
            payload = cache.payload
            memory = payload.new_zeros(payload[..., 0].numel() * (payload.shape[-1] + 3) + 1)
            rows = memory[1:].view(*payload.shape[:-1], -1)[..., : payload.shape[-1]]
            cache = PagedLatentCache(cache.codec, rows, cache.scales, scale)
        for part in (cache.payload, cache.scales):
            if part is not None:
                part.view(torch.uint8).fill_(POISON)
        order = torch.randperm(sum(pages) + 1, generator=generator)
        table = torch.full((len(pages), max(pages) + 1), 2**31 - 1)
        for request, own in enumerate(order[: sum(pages)].split(pages)):
            table[request, : len(own)] = own
        if not self.flat:
            return cache, self._spread(table.to(device, torch.int32))
        slots = [
            table[request, torch.arange(count) // self.page_size] * self.page_size
            + torch.arange(count) % self.page_size
            for request, count in enumerate(counts)
        ]
        starts = torch.tensor([0, *accumulate(counts)]).to(device)
        return cache, (self._spread(starts), self._spread(torch.cat(slots).to(device)))

    def _q_out(self, q_rope: Tensor) -> Tensor | None:
        if self.q_out == "new":
            return None
        if self.q_out == "in_place":
            return q_rope
        if self.q_out == "e4m3":
            return torch.empty(q_rope.shape, dtype=E4M3, device=q_rope.device)
        assert self.q_out == "slice"
        return q_rope.new_zeros(*q_rope.shape[:2], q_rope.shape[2] + 10)[..., 10:]


def parts_of(cache: PagedLatentCache) -> dict[str, Tensor]:
    """Everything stored, as what it is: e4m3 latents, float scales, bf16 columns."""
    payload, row = cache.payload.cpu(), cache.row
    parts = {"payload": payload}
    if payload.dtype == torch.uint8:
        rope_at = payload.shape[-1] - 2 * row.qk_rope_head_dim
        parts = {
            "latent": viewed(payload[..., : row.kv_lora_rank], E4M3),
            "inline scales": viewed(payload[..., row.kv_lora_rank : rope_at], torch.float32),
            "rope": viewed(payload[..., rope_at:], torch.bfloat16),
        }
    if cache.scales is not None:
        parts["scales"] = cache.scales.cpu()
    return parts


def viewed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of the tensor's bits as another dtype, along the last axis."""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    return copy.flatten().view(dtype).view(*tensor.shape[:-1], -1) if copy.numel() else copy


def assert_same_bytes(name: str, actual: Tensor, expected: Tensor) -> None:
    """Equal bits, and NaN for NaN."""
    differs = viewed(actual, torch.uint8) != viewed(expected, torch.uint8)
    if expected.is_floating_point():
        differs = differs.unflatten(-1, (-1, expected.element_size())).any(-1)
        differs &= ~(actual.float().isnan() & expected.float().isnan())
    assert not differs.any(), f"{name}: {int(differs.sum())} elements differ: {differs.nonzero()}"


def assert_kernels_agree(step: Step, device: torch.device) -> Tensor:
    """Gives the rotated queries, too."""
    rotated, cache = step.run("triton", device)
    expected_rotated, expected_cache = step.run("cpu", torch.device("cpu"))
    assert_same_bytes("q_rope_out", rotated, expected_rotated)
    expected = parts_of(expected_cache)
    for name, actual in parts_of(cache).items():
        assert_same_bytes(name, actual, expected[name])
    return rotated


@pytest.mark.slow
@pairwise(format=FORMATS, rope=ROPES, q_out=["new", "in_place", "slice", "e4m3"])
def test_a_real_row(format, rope, q_out, device):
    lengths = {"kv_lens": (4, 2, 2), "q_lens": (1, 2, 0)}
    step = Step(format, real_row(format), rope, q_out, **lengths, flat=q_out == "slice")
    assert_kernels_agree(step, device)


@pytest.mark.slow
def test_more_heads_than_a_program_takes(device):
    assert_kernels_agree(Step(row=RowShape(36, 64), heads=20), device)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_of_unusual_width_among_poison(format, rope, device):
    assert_kernels_agree(Step(format, ODD, rope, strided=True), device)


# of other columns each, so not every pair
@pytest.mark.slow
@pytest.mark.parametrize(
    ("freqs_dtype", "gamma_dtype"), [("bf16", "fp32"), ("fp16", "bf16"), ("fp32", "fp16")]
)
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), [("bf16", "fp16"), ("fp16", "fp32")])
def test_every_dtype(q_dtype, kv_dtype, freqs_dtype, gamma_dtype, device):
    dtypes = {"q_dtype": q_dtype, "kv_dtype": kv_dtype}
    tables = {"freqs_dtype": freqs_dtype, "gamma_dtype": gamma_dtype}
    for rope in ROPES:
        assert_kernels_agree(Step("fp32", ODD, rope, **dtypes, **tables), device)


@pytest.mark.slow
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("format", BYTES)
def test_scales_of_both_kinds(format, power_of_two, device):
    assert_kernels_agree(Step(format, real_row(format), power_of_two=power_of_two), device)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scale", [0.03, torch.tensor(0.07), torch.tensor([[0.3]], dtype=torch.float64)], ids=str
)
def test_a_scale_of_the_tensor(scale, device):
    assert_kernels_agree(Step("fp8", tensor_scale=scale), device)


@pytest.mark.slow
@pytest.mark.parametrize("format", BYTES)
def test_rows_at_any_byte(format, device):
    if format == "fp8_block64":
        pytest.skip("its pages are contiguous")
    for rope in ROPES:
        assert_kernels_agree(Step(format, ODD, rope, odd_bytes=True), device)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
@pytest.mark.parametrize("format", FORMATS)
def test_nan_infinity_and_zero(format, epsilon, device):
    row = RowShape(132, 6)  # a second group of 4 columns
    specials = {(0, 3): torch.nan, (1, 131): torch.inf, (2, 133): torch.nan, (3, 134): -torch.inf}
    specials |= {(4, column): 0.0 for column in range(132)}  # infinity times 0 without epsilon
    specials |= {(5, 0): 3e38}  # whose square is infinite
    step = Step(format, row, epsilon=epsilon, kv_dtype="fp32", specials=specials)
    assert_kernels_agree(step, device)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["bf16", "fp8_token", "fp8_block128"])
def test_tiny_rows_have_the_smallest_scale(format, device):
    zeros = {(token, column): 0.0 for token in range(6) for column in range(36)}
    tiny = {(token, 5): 2.0**-30 for token in range(3)}
    step = Step(format, kv_dtype="fp32", epsilon=1.0, specials=zeros | tiny)
    assert_kernels_agree(step, device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "probes", "rows", "heads"),
    [("bf16", 2, 4, 1), ("fp8_block128", 4, 4, 16), ("bf16", 16, 2, 2)],
)
@pytest.mark.usefixtures("no_replay")
def test_requests_are_found_among_many(format, probes, rows, heads, device, monkeypatch):
    """Empty ones first, last and in between; programs of several tokens, the last one of fewer."""
    config = AppendConfig(rows=rows, heads=heads, probes=probes)
    monkeypatch.setattr(
        "mlakit.kernels.triton.norm_rope_quant.pick_append_config", lambda **_: config
    )
    q_lens = (0, 0, 2, 1, 0, 0, 0, 3, 1, 0, 1, 1, 2, 0) * 3  # 33 tokens
    kv_lens = tuple((5 * request) % 9 + q_len for request, q_len in enumerate(q_lens))
    step = Step(format, q_lens=q_lens, kv_lens=kv_lens, heads=2, flat=format == "bf16")
    assert_kernels_agree(step, device)


PADDED = (None, -1, None, -1, -1, None)  # slots of six tokens
ANYWHERE = (None, None, None, -7, 2**40, None)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_given_slots_among_poison(format, device):
    step = Step(format, ODD, slots=PADDED, positions=ANYWHERE, strided=True)
    rotated = assert_kernels_agree(step, device)
    padding = rotated[[3, 4]]
    assert (padding == 0).all()
    assert not padding.signbit().any()
    assert (rotated[[0, 1, 2, 5]] != 0).any(-1).all()  # a position is enough to be rotated


@pytest.mark.slow
@pytest.mark.parametrize("q_out", ["in_place", "slice", "e4m3"])
def test_given_slots_and_queries_anywhere(q_out, device):
    slots = {"slots": PADDED, "positions": ANYWHERE}
    assert_kernels_agree(Step("fp8_block128", q_out=q_out, **slots), device)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["bf16", "fp8_token", "fp8_block64"])
def test_given_slots_are_those_of_the_page_table(format, device):
    """Slots and the page table give the same bits."""
    step = Step(format, real_row(format))
    by_slot = replace(step, slots=(None,) * 6, positions=(None,) * 6)
    for backend, place in (("cpu", torch.device("cpu")), ("triton", device)):
        rotated, cache = step.run(backend, place)
        again, other = by_slot.run(backend, place)
        assert_same_bytes("q_rope_out", again, rotated)
        for name, stored in parts_of(other).items():
            assert_same_bytes(name, stored, parts_of(cache)[name])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.usefixtures("no_replay")
def test_padding_alone_writes_no_row(rows, device, monkeypatch):
    """Also programs of several tokens, and NaN in the latents of padding."""
    config = AppendConfig(rows=rows, heads=2, probes=4)
    monkeypatch.setattr(
        "mlakit.kernels.triton.norm_rope_quant.pick_append_config", lambda **_: config
    )
    garbage = {(token, column): torch.nan for token in range(6) for column in range(42)}
    step = Step("fp8_token", slots=(-1,) * 6, positions=(-1,) * 6, specials=garbage)
    for backend, place in (("cpu", torch.device("cpu")), ("triton", device)):
        rotated, cache = step.run(backend, place)
        assert (rotated == 0).all()
        assert (cache.payload.cpu().view(torch.uint8) == POISON).all()
        assert (cache.scales.cpu().view(torch.uint8) == POISON).all()


@pytest.mark.slow
def test_padding_needs_no_freqs(device):
    """Nor has a batch of nothing but padding to have any."""
    row = RowShape(8, 4)
    for backend, place in (("cpu", torch.device("cpu")), ("triton", device)):
        cache = PagedLatentCache.allocate(row, num_pages=1, page_size=2, device=place)
        rotated = ops.norm_rope_quant_append(
            torch.ones(2, 1, 4, device=place),
            torch.ones(2, 12, device=place),
            torch.ones(0, 4, device=place),
            torch.ones(8, device=place),
            cache,
            slots=torch.tensor([-1, -1], device=place),
            positions=torch.tensor([0, 3], device=place),
            epsilon=1e-6,
            backend=backend,
        )
        assert (rotated == 0).all()
        assert (cache.payload == 0).all()


@pytest.mark.slow
def test_lengths_that_leave_out_new_tokens_touch_nothing_before_the_tables(device):
    """On a GPU no host looks at them: tokens at negative positions are not stored."""
    page_size, row, zeros = 4, RowShape(8, 4), partial(torch.zeros, device=device)
    cache = PagedLatentCache.allocate(row, num_pages=4, page_size=page_size, device=device)
    cache.payload.fill_(torch.nan)
    entries = torch.tensor([[3, 2, 1, 0]], dtype=torch.int32, device=device)
    launch = import_module("mlakit.kernels.triton.norm_rope_quant").norm_rope_quant_append
    q_rope_out = zeros(7, 1, 4)
    flat = (zeros(2, dtype=torch.int32), entries[0, 2:])
    for table, row_of_token in ((entries[:, 2:], [1, 0]), (flat, [0, 1])):
        arguments = AppendArguments(
            q_rope=torch.ones(7, 1, 4, device=device),
            kv=torch.ones(7, 12, device=device),
            freqs=torch.ones(16, 4, device=device)[8:],
            gamma=torch.ones(8, device=device),
            layer=cache.layer(0),
            page_table=table,
            kv_lens=torch.tensor([1], device=device),  # of seven new tokens
            q_starts=torch.tensor([0, 7], device=device),
            slots=None,
            positions=None,
            shard=UNSHARDED,
            epsilon=1e-6,
            rope="half",
            power_of_two_scales=False,
            backend="triton",
        )
        launch(arguments, q_rope_out)
        stored = ~cache.payload[0].isnan().any(-1)
        assert stored.nonzero().tolist() == [row_of_token]
        cache.payload.fill_(torch.nan)
        assert (q_rope_out[:6] == 0).all()
        assert (q_rope_out[6] != 0).any()


@pytest.mark.slow
def test_no_rope(device):
    assert_kernels_agree(Step("fp8_block128", RowShape(512, 0)), device)


@pytest.mark.parametrize("tokens", [0, 1, 7, 128, 4096, 100_000])
@pytest.mark.parametrize(("heads", "rope"), [(1, 0), (3, 6), (16, 64), (128, 64), (128, 256)])
def test_configs_are_powers_of_two(tokens, heads, rope):
    config = pick_append_config(
        tokens=tokens, heads=heads, kv_lora_rank=512, rope=rope, itemsize=2, num_sms=132
    )
    for size in (config.rows, config.heads, config.probes, config.num_warps):
        assert size & (size - 1) == 0 < size
    assert config.heads * max(rope, 1) <= 8192


def test_codecs_of_these_tests_exist():
    assert all(row_codec(format, ODD).row == ODD for format in FORMATS)
