"""The cache of DeepSeek-V4: rows that stand for several tokens, and a part of constant size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mlakit.formats import Format, row_codec
from mlakit.layer.v4.cache import STATE_PAGE
from mlakit.model.geometry import RowShape
from mlakit.model.v4 import CSA, HCA, V4Config
from mlakit.tools.memory.sizes import CacheSize

UNCOMPRESSED = "a row per token"


class LanePages(NamedTuple):
    """Pages whose rows stand for `rate` tokens, all layers together."""

    rate: int
    page_bytes: int


@dataclass(frozen=True)
class CompressedSize(CacheSize):
    """The bytes of window rows, compressed rows, index keys and states.

    token_bytes     what each further token adds
    lanes           pages that grow with the context
    constant_bytes  of one request: its window and the states of unfinished windows
    """

    lanes: tuple[LanePages, ...] = ()
    constant_bytes: int = 0

    def rank_bytes(self, context: int, batch: int = 1) -> int:
        """Bytes of a batch of requests with so many tokens."""
        grown = sum(
            -(-(context // lane.rate) // self.page_size) * lane.page_bytes for lane in self.lanes
        )
        return batch * (grown + self.constant_bytes)

    def max_tokens(self, free_bytes: int) -> int:
        """Tokens of one request that fit."""
        left = max(free_bytes - self.constant_bytes, 0)
        per_token = sum(lane.page_bytes / self.page_size / lane.rate for lane in self.lanes)
        return int(left / per_token)


def compressed_size(config: V4Config, name: Format, page_size: int) -> CompressedSize:
    """The size in one format. Raises ValueError for unsupported rows."""
    row = row_codec(name, config.row)
    keys: Format = "fp8_token" if name.startswith("fp8") else name
    key = row_codec(keys, RowShape(config.index_head_dim, 0))
    count = {kind: config.kinds.count(kind) for kind in (CSA, HCA)}
    csa = count[CSA] * (row.page_bytes(page_size) + key.page_bytes(page_size))
    hca = count[HCA] * row.page_bytes(page_size)
    lanes = (LanePages(config.csa_rate, csa), LanePages(config.hca_rate, hca))
    per_token = (
        count[CSA] * (row.bytes_per_token + key.bytes_per_token) / config.csa_rate
        + count[HCA] * row.bytes_per_token / config.hca_rate
    )
    # a window that begins inside of a page has rows of one page more
    window_pages = -(-config.sliding_window // page_size) + 1
    window = len(config.kinds) * row.page_bytes(page_size)
    widths = {CSA: 4 * (config.head_dim + config.index_head_dim), HCA: 2 * config.head_dim}
    waiting = {CSA: 2 * config.csa_rate, HCA: config.hca_rate}
    states = sum(
        count[kind] * (-(-waiting[kind] // STATE_PAGE) + 1) * STATE_PAGE * widths[kind] * 4
        for kind in (CSA, HCA)
    )
    return CompressedSize(
        name,
        round(per_token),
        per_token,
        csa + hca,
        page_size,
        1,
        lanes=lanes,
        constant_bytes=window_pages * window + states,
    )


def uncompressed_size(config: V4Config, page_size: int) -> CacheSize:
    """bf16 rows of all tokens in every layer, without windows and compression."""
    row = row_codec("bf16", config.row)
    layers = len(config.kinds)
    token = layers * row.bytes_per_token
    return CacheSize(UNCOMPRESSED, token, token, layers * row.page_bytes(page_size), page_size, 1)
