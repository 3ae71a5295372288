"""The calls of a serving process, from which every kernel that it launches can be learnt.

They come in the same order in every process: a `worker.Task` names one by its number.

A call takes tensors of the shapes, dtypes and strides that a user of the ops has; their memory is
never written and holds nothing. Sizes that serving changes from step to step take every value that
makes a difference to a kernel: powers of two, one more, and what lies on both sides of a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.formats import row_codec
from mlakit.kernels.triton.configs import TOPK_WHOLE
from mlakit.precompile.deployment import Deployment

E4M3 = torch.float8_e4m3fn
NUM_PAGES = 2  # of every cache: with one, its page stride would be unknown
MAX_BATCH = 256  # requests; kernels and their constants stay the same from 128 on
DRAFTS = (1, 2, 4, 8)  # queries of a request that decodes
SCALE = 0.1  # of scores: kernels depend on its sign only
# virtual memory of one tensor; none of it is touched
MAX_ELEMENTS = 2**29


@dataclass(frozen=True)
class Call:
    """A call of an op, with a name for messages."""

    name: str
    run: Callable[[], object]


def powers_of_two(last: int) -> Iterator[int]:
    """Yield 1, 2, 4, … and, if it is none of them, `last`."""
    n = 1
    while n < last:
        yield n
        n *= 2
    yield last


def ones(*shape: int) -> Tensor:
    """Scales in the host's memory, whose values a pool checks when it is made."""
    return torch.ones(shape, dtype=torch.float32, device="cpu")


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory of the host, whatever an engine has made the default device and dtype."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return empty(*shape, dtype=dtype)


def unaligned(*shape: int) -> Tensor:
    """Integers at an address that is a multiple of 4 bytes only, as in a slice of a larger tensor:
    to a kernel that is another kind of pointer."""
    return integers(1 + prod(shape))[1:].view(shape)


def latent_cache(d: Deployment, tensor_scale: float | Tensor = 1.0) -> PagedLatentCache:
    """A cache whose pages lie `d.page_rows` rows apart."""
    shape = d.geometry.row
    if d.page_rows == d.page_size:
        return PagedLatentCache.allocate(
            shape,
            d.format,
            num_pages=NUM_PAGES,
            page_size=d.page_size,
            tensor_scale=tensor_scale,
        )
    codec = row_codec(d.format, shape)
    rows = empty(NUM_PAGES, d.page_rows, codec.payload_elements, dtype=codec.payload_dtype)
    return PagedLatentCache.wrap(
        rows[:, : d.page_size], shape, format=d.format, tensor_scale=tensor_scale
    )


def index_cache(d: Deployment) -> PagedLatentCache:
    """The keys of the indexer, as engines keep them: the bytes of a page, then its scales."""
    width = d.geometry.index_head_dim + 4
    pages = empty(NUM_PAGES, d.page_size, width, dtype=torch.uint8)
    return PagedLatentCache.wrap_index_keys(pages)


def by_token(tokens: int, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    return empty(tokens, heads, width, dtype=dtype)


def by_head(tokens: int, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """[tokens, heads, width] in which the tokens of a head are adjacent, as after a product per
    head."""
    return empty(heads, tokens, width, dtype=dtype).transpose(0, 1)


def token_counts(d: Deployment) -> list[int]:
    """Numbers of tokens that split rows of scores, and lists of rows, in every way."""
    counts = {*powers_of_two(2048), *(3 * n for n in powers_of_two(512))}
    return sorted({min(n, d.max_tokens) for n in counts})


def score_shapes(d: Deployment) -> Iterator[tuple[int, int]]:
    """Yield (tokens, columns) of scores of all widths that matter: kernels are compiled for powers
    of two and, apart from them, for rows that begin at multiples of 16 columns."""
    widths = {each for n in powers_of_two(d.max_keys) for each in (n, n - 8, n // 16 * 16)}
    for columns in sorted(each for each in widths if each > 0):
        # short rows are never split
        for tokens in token_counts(d) if columns > TOPK_WHOLE else (1,):
            if tokens * columns <= MAX_ELEMENTS:
                yield tokens, columns


class IndexBatch(NamedTuple):
    """The requests whose keys the indexer scores."""

    batch: int
    tokens: int
    columns: int

    def __str__(self) -> str:
        return f"{self.batch} requests, {self.tokens} tokens, {self.columns} keys"


def index_batches(d: Deployment) -> Iterator[IndexBatch]:
    """Batches with one token per request, with drafts, and with prompts."""
    for batch in (1, 2, MAX_BATCH):
        for mean in (*DRAFTS, 3, 16, 64, 256):
            tokens = batch * mean
            for columns in sorted({64, 65, d.max_keys}):
                if tokens <= max(d.max_tokens, MAX_BATCH) and tokens * columns <= MAX_ELEMENTS:
                    yield IndexBatch(batch, tokens, columns)


def selection_batches(d: Deployment) -> Iterator[IndexBatch]:
    """Batches in which scores and selection are one op; those of many tokens go in blocks."""
    yield from index_batches(d)
    for tokens, columns in score_shapes(d):
        yield IndexBatch(min(tokens, MAX_BATCH), tokens, columns)
    for batch in powers_of_two(1024):
        yield IndexBatch(batch, max(d.max_tokens, batch), d.max_keys)
