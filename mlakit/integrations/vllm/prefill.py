"""The prefill backend MLAKIT: expanded attention, of new tokens and over cached ones."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from mlakit import UnsupportedError
from mlakit.integrations.vllm import calls, plugin
from mlakit.integrations.vllm.seams import MLAPrefillBackend


class PrefillBackend(MLAPrefillBackend):
    """vLLM makes one per metadata builder, and gives it the metadata of each step."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return plugin.PREFILL

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is None or bool(device_capability.major >= 8)

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of the new tokens of each request to each other, causal."""
        if output_scale is not None:
            raise UnsupportedError("MLAKIT prefill: output_scale must be None")
        starts = self._prefill_metadata.query_start_loc
        result, lse = self._attend(q, k, v, starts, starts, is_causal=True, out=out)
        return (result, by_heads(lse)) if return_softmax_lse else result

    def run_prefill_context_chunk(
        self,
        chunk: Any = None,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        out: Tensor | None = None,
        chunk_idx: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of the new tokens to a part of the cached ones, all of which they see.

        chunk      its metadata
        chunk_idx  its number in the metadata of all, in its place (vLLM before 0.28)
        """
        if chunk_idx is not None:
            context = self._prefill_metadata.chunked_context
            starts = self._prefill_metadata.query_start_loc, context.cu_seq_lens[chunk_idx]
        else:
            starts = chunk.query_start_loc, chunk.cu_seq_lens
        result, lse = self._attend(q, k, v, *starts, is_causal=False, out=out)
        return result, by_heads(lse)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_starts: Tensor,
        kv_starts: Tensor,
        *,
        is_causal: bool,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return calls.prefill(
            q,
            k,
            v,
            q_starts,
            kv_starts,
            self.qk_nope_head_dim,
            self.scale,
            is_causal=is_causal,
            out=out,
        )


def by_heads(lse: Tensor) -> Tensor:
    """lse [heads, tokens] as vLLM's kernels take it that merge partial results."""
    return lse.contiguous()
