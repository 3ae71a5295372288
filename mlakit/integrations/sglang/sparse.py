"""The backend `mlakit` for models with a lightning indexer, such as DeepSeek-V3.2 and GLM-5.

The indexer projects its queries and stores its keys as SGLang does; its scores and its selection
are mlakit's, and need no DeepGEMM. A selection is a list of cache rows, which sparse_mla reads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import mlakit
from mlakit.integrations.announce import announce
from mlakit.integrations.sglang import calls, plugin, seams
from mlakit.integrations.sglang.backend import LOGGER, DenseBackend, require
from mlakit.integrations.sglang.seams import BaseIndexerMetadata

INDEX_PAGE = 64


class SparseBackend(DenseBackend):
    """All layers of a model."""

    def __init__(self, runner: Any, draft_step: int | None = None) -> None:
        super().__init__(runner, draft_step)
        self.always_selected = always_selected(runner.model_config.hf_config)
        seams.replace_selection(select, lambda metadata: isinstance(metadata, IndexerMetadata))

    def _require_support(self, runner: Any) -> None:
        super()._require_support(runner)
        config, page_size = runner.model_config.hf_config, runner.page_size
        pooled = seams.keys_per_index_key(config)
        require(page_size == INDEX_PAGE, "page_size", f"be {INDEX_PAGE} with an indexer", page_size)
        require(pooled == 1, "index_kpool", "be 1: a key for every token", pooled)
        topk, always = self._index_topk(runner.model_config), sum(always_selected(config))
        name = "index_init_tokens and index_local_tokens together"
        require(always <= (topk or 0), name, f"be at most index_topk, {topk}", always)
        is_split = seams.is_dsa_enable_prefill_cp()
        require(not is_split, "enable_prefill_cp", "be off with an indexer", is_split)
        is_offloaded = getattr(runner, "hisparse_coordinator", None) is not None
        require(not is_offloaded, "enable_hisparse", "be off", is_offloaded)

    def _index_topk(self, config: Any) -> int | None:
        return int(seams.get_dsa_index_topk(config.hf_config))

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> IndexerMetadata:
        """Return the metadata of the step that a layer's indexer needs."""
        return IndexerMetadata(self._current(), self.always_selected)

    def _attend(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        layer: Any,
        topk_indices: Tensor | None,
        sink: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if topk_indices is None:
            raise ValueError(f"{plugin.NAME}: topk_indices must be given with an indexer, got None")
        q_latent, q_rope = q if isinstance(q, tuple) else (q, None)
        pool = self._pool(layer)
        out, lse, _ = mlakit.sparse_mla(
            q_latent,
            pool,
            topk_indices[: len(q_latent)],
            q_rope=q_rope,
            softmax_scale=layer.scaling,
            sink=sink,
        )
        announce(LOGGER, plugin.NAME, "sparse_mla", pool)
        return out, lse


class IndexerMetadata(BaseIndexerMetadata):
    """The step, under SGLang's names."""

    def __init__(self, step: calls.Step, always_selected: tuple[int, int]) -> None:
        self.step, self.always_selected = step, always_selected

    def get_seqlens_int32(self) -> Tensor:
        return self.step.batch.kv_lens

    def get_page_table_64(self) -> Tensor:
        return self.step.batch.block_table

    def get_page_table_1(self) -> Tensor:
        raise NotImplementedError("mlakit reads pages of 64")

    def get_seqlens_expanded(self) -> Tensor:
        return calls.visible_lens(self.step)

    def topk_transform(self, logits: Tensor, topk: int, **others: Any) -> Tensor:
        """The rows of all visible tokens: the indexer asks where no request is longer than topk.

        logits  [tokens, topk], of no meaning
        """
        return calls.visible_rows(self.step, topk)


def select(
    indexer: Any,
    layer_id: int,
    q: Tensor,
    weights: Tensor,
    metadata: IndexerMetadata,
    out: Tensor | None,
) -> Tensor:
    """The selection of one layer in a step, in the place of the indexer's own."""
    keys = seams.index_keys(indexer, layer_id)
    always = metadata.always_selected
    return calls.select_rows(q, weights, keys, metadata.step, indexer.index_topk, out, always)


def always_selected(config: Any) -> tuple[int, int]:
    """The first and the last tokens that LongCat's indexer always selects; 0 in other models."""
    first, last = (
        getattr(config, name, 0) or 0 for name in ("index_init_tokens", "index_local_tokens")
    )
    return first, last
