"""A step of SGLang around our backend: pools, batches and layers, and the rows for the oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import PagedLatentCache, RowShape, reference
from mlakit.integrations import steps
from mlakit.integrations.sglang import calls, plugin
from mlakit.tools.testing import assert_matches, poison
from tests.integrations.sglang import fake_engine
from tests.integrations.sglang.fake_engine import ForwardMode, Settings

ROW = RowShape(512, 64)
SCALE = 0.05
HEADS = 16
NOPE, V_WIDTH = 128, 128
CONTEXT = 400
INDEX_WIDTH, INDEX_HEADS, TOPK = 128, 32, 48
# dtype of the cache, and the width of its rows
CACHES = {
    "bfloat16": (torch.bfloat16, 576),
    "fp8_e4m3": (torch.float8_e4m3fn, 576),
    "fp8_e4m3 of DSA": (torch.float8_e4m3fn, 656),
}


class Engine:
    """One layer of a model, with the requests of a step and rows in its cache."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        lengths: list[int],
        device: torch.device,
        *,
        cache: str = "bfloat16",
        page: int = 64,
        settings: Settings | None = None,
        **config: Any,
    ) -> None:
        self.names = fake_engine.install(monkeypatch, settings)
        self.device, self.page, self.lengths = device, page, lengths
        torch.manual_seed(7)
        per_request = -(-CONTEXT // page)
        pages = len(lengths) * per_request + 2
        dtype, width = CACHES[cache]
        self.pool = fake_engine.Pool(ROW, dtype, width, pages * page, page, device)
        self.names["pool"].current = self.pool
        # requests have rows of the pool in any order; entries that no token needs are no slot
        self.requests = torch.randperm(len(lengths) + 3)[: len(lengths)].to(device)
        tokens = torch.full((len(lengths) + 3, CONTEXT), 2**31 - 1, dtype=torch.int32)
        order = (torch.randperm(pages - 1) + 1).tolist()
        for request in self.requests.tolist():
            starts = torch.tensor([order.pop() for _ in range(per_request)]) * page
            slots = (starts[:, None] + torch.arange(page)).flatten()[:CONTEXT]
            tokens[request] = slots.to(torch.int32)
        self.everything = tokens.clone()
        for request, length in zip(self.requests.tolist(), lengths, strict=True):
            tokens[request, length:] = 2**31 - 1
        self.rows = steps.wrap(calls.paged(self.pool.rows[1], page), ROW, None)
        self.req_to_token = tokens.to(device)
        self.runner = self._runner(dtype, config)
        for request, length in enumerate(lengths):
            if length:
                rows = torch.randn(length, ROW.width, device=device)
                self.rows.layer(0).write(self.slots(request, length), rows)
        self.backend = plugin.create_backend(self.runner)
        self.layer = fake_engine.layer_of(HEADS, ROW, SCALE)

    def _runner(self, dtype: torch.dtype, config: dict[str, Any]) -> SimpleNamespace:
        model_config = SimpleNamespace(
            kv_lora_rank=ROW.kv_lora_rank,
            qk_rope_head_dim=ROW.qk_rope_head_dim,
            qk_nope_head_dim=NOPE,
            hf_config=SimpleNamespace(**config),
            num_attention_heads=128,
            dtype=torch.bfloat16,
        )
        return SimpleNamespace(
            model_config=model_config,
            use_mla_backend=True,
            kv_cache_dtype=dtype,
            page_size=self.page,
            device=self.device,
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
            token_to_kv_pool=self.pool,
        )

    def slots(self, request: int, length: int) -> Tensor:
        """Of the first tokens of a request."""
        return self.everything[int(self.requests[request]), :length].long().to(self.device)

    def oracle_rows(self, lengths: list[int]) -> list[Tensor]:
        layer = self.rows.layer(0)
        return [
            layer.read(self.slots(request, length), torch.float64).cpu()
            for request, length in enumerate(lengths)
        ]

    def batch(self, mode: ForwardMode, q_lens: list[int] | None = None) -> SimpleNamespace:
        """ForwardBatch; with q_lens, the newest tokens of each request are new."""
        lens = torch.tensor(self.lengths, dtype=torch.int64)
        new = q_lens or [1] * len(self.lengths)
        where = [
            self.slots(i, n)[n - q :]
            for i, (n, q) in enumerate(zip(self.lengths, new, strict=True))
        ]
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(self.lengths),
            req_pool_indices=self.requests.clone(),
            seq_lens=lens.to(self.device),
            seq_lens_cpu=lens,
            extend_seq_lens=torch.tensor(new, dtype=torch.int32, device=self.device),
            extend_seq_lens_cpu=new,
            extend_prefix_lens_cpu=[n - q for n, q in zip(self.lengths, new, strict=True)],
            out_cache_loc=torch.cat(where),
            attn_attend_prefix_cache=None,
            mha_one_shot=False,
            mha_return_lse=False,
        )

    def index_keys(self) -> PagedLatentCache:
        """Random index keys of all tokens in the pool, NaN elsewhere."""
        pages = len(self.pool.rows[1]) // self.page
        buffer = torch.zeros(pages, self.page * (INDEX_WIDTH + 4), dtype=torch.uint8)
        self.pool.index_keys[1] = poison(buffer).to(self.device)
        keys = PagedLatentCache.wrap_index_keys(self.pool.index_keys[1].view(pages, self.page, -1))
        for request, length in enumerate(self.lengths):
            if length:
                rows = torch.randn(length, INDEX_WIDTH, device=self.device)
                keys.layer(0).write(self.slots(request, length), rows, power_of_two_scales=True)
        return keys


def queries(tokens: int, device: torch.device) -> Tensor:
    torch.manual_seed(11)
    return torch.randn(tokens, HEADS, ROW.width, device=device).bfloat16()


def parts(q: Tensor) -> dict[str, Tensor]:
    """As a DeepSeek layer hands it over: a transposed product with W_UK, and a view of q."""
    latent = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    return {"q": latent, "q_rope": q[..., 512:]}


def check(out: Tensor, q: Tensor, rows: list[Tensor], q_lens: list[int], **named: Any) -> None:
    """Absorbed attention against the oracle."""
    exact, naive = (
        reference.mla_decode(
            q.cpu(), rows, q_lens, softmax_scale=SCALE, v_width=512, dtype=dtype, **named
        )
        for dtype in (torch.float64, torch.float32)
    )
    assert out.shape == (len(q), HEADS * 512)
    assert_matches("out", out.view(-1, HEADS, 512).cpu(), exact[0], naive[0])
