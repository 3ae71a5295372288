"""The paged latent cache: storage, layers, foreign tensors seen without a copy, page tables.

A pool is `num_pages` pages of `page_size` rows, for each of `num_layers` layers. A *slot* is the
physical address of a row, `page * page_size + offset`, the same in every layer. Token t of a
request lives in the page its page table names at column t // page_size, at offset t % page_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from mlakit.checks import Dims
from mlakit.formats import Format, PageFooterCodec, RowCodec, known_format, row_codec
from mlakit.geometry import MLAGeometry, RowShape

PageTable: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""int32 [batch, max_pages] page ids; or (kv_starts [batch + 1], slots), one flat list of rows."""

# elements; torch has one thread copy a slice of 2**15, and pieces just below that gain less
PIECE_ELEMENTS = 2**14
_HALF_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_BYTE_TYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, eq=False)
class CacheLayer:
    """One layer of a pool: what an attention kernel is handed."""

    codec: RowCodec
    payload: Tensor  # [num_pages, page_size, codec.payload_elements]
    scales: Tensor | None  # [num_pages, page_size, codec.scale_elements]
    tensor_scale: float | Tensor = 1.0

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self.payload.shape[1]

    @property
    def alone(self) -> PagedLatentCache:
        """A pool of this layer only, sharing its memory."""
        scales = None if self.scales is None else self.scales[None]
        return PagedLatentCache(self.codec, self.payload[None], scales, self.tensor_scale)

    @property
    def num_slots(self) -> int:
        """Rows of the layer: every slot is below this."""
        return self.payload.shape[0] * self.payload.shape[1]

    def read(self, slots: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows [..., width] at int64 `slots` [...], dequantised."""
        page, offset = slots // self.page_size, slots % self.page_size
        scales = None if self.scales is None else self.scales[page, offset]
        payload = _bits(self.payload)[page, offset].view(self.payload.dtype)
        return self.codec.decode(payload, scales, tensor_scale=self.tensor_scale, dtype=dtype)

    def read_tokens(self, page_table: PageTable, request: int, first: int, last: int) -> Tensor:
        """Rows [last − first, width] float32 of tokens [first, last) of one request, dequantised.

        Whole pages are gathered at a time; tokens of a single page are not copied to be read.
        """
        if isinstance(page_table, tuple):
            return self.read(request_slots(page_table, self.page_size, request, first, last))
        pages = page_table[request, first // self.page_size : -(-last // self.page_size)]
        offset = first % self.page_size

        def tokens(pool: Tensor) -> Tensor:
            if len(pages) == 1:
                return pool[int(pages), offset : offset + last - first]
            return _gather_pages(pool, pages)[offset : offset + last - first]

        scales = None if self.scales is None else tokens(self.scales)
        return self.codec.decode(tokens(self.payload), scales, tensor_scale=self.tensor_scale)

    def write(self, slots: Tensor, rows: Tensor, *, power_of_two_scales: bool = False) -> None:
        """Quantise `rows` [n, width] into int64 `slots` [n]."""
        payload, scales = self.codec.encode(
            rows, tensor_scale=self.tensor_scale, power_of_two=power_of_two_scales
        )
        page, offset = slots // self.page_size, slots % self.page_size
        _bits(self.payload)[page, offset] = _bits(payload)
        if self.scales is not None and scales is not None:
            self.scales[page, offset] = scales


def _bits(tensor: Tensor) -> Tensor:
    """e4m3 as bytes: on CUDA torch indexes those in every version."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def from_host(values: Sequence[int] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of numbers known on the host; a GPU fetches it without making the host wait."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda" or not len(host):
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def _gather_pages(pool: Tensor, pages: Tensor) -> Tensor:
    """The rows of `pages`, end to end: [pages · page_size, columns].

    Threads share the work of `index_select` only between slices that are small: packed pages are
    therefore gathered in equal pieces.
    """
    _, page_size, columns = pool.shape
    sizes = (size for size in range(page_size, 0, -1) if page_size % size == 0)
    rows = next((size for size in sizes if size * columns <= PIECE_ELEMENTS), 1)
    pieces = page_size // rows
    if pieces == 1 or not pool.is_contiguous():
        return pool.index_select(0, pages).flatten(0, 1)
    index = pages.long()[:, None] * pieces + torch.arange(pieces, device=pages.device)
    by_piece = pool.view(-1, rows * columns)
    return by_piece.index_select(0, index.flatten()).view(-1, columns)


@dataclass(frozen=True, eq=False)
class PagedLatentCache:
    """A pool of latent rows: `allocate` makes one, `wrap` sees an engine's tensor as one."""

    codec: RowCodec
    payload: Tensor  # [num_layers, num_pages, page_size, codec.payload_elements], any strides
    scales: Tensor | None  # [num_layers, num_pages, page_size, codec.scale_elements]
    tensor_scale: float | Tensor = 1.0  # of format "fp8": stored value = value / tensor_scale

    @property
    def row(self) -> RowShape:
        """The columns of its rows."""
        return self.codec.row

    @property
    def format(self) -> str:
        """The name of its row format."""
        return self.codec.name

    @property
    def num_layers(self) -> int:
        """Layers that share the page tables."""
        return self.payload.shape[0]

    @property
    def num_pages(self) -> int:
        """Pages of each layer."""
        return self.payload.shape[1]

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self.payload.shape[2]

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.payload.device

    def layer(self, index: int) -> CacheLayer:
        """One layer of the pool, sharing its memory; ValueError if there is no such layer."""
        if not 0 <= index < self.num_layers:
            raise ValueError(
                f"PagedLatentCache.layer: index must be in [0, {self.num_layers}), got {index}"
            )
        return self.find_layer(index) or self._view_of(index)

    def find_layer(self, index: int) -> CacheLayer | None:
        """The same object for a layer each time; None where there is no such layer."""
        if torch.compiler.is_compiling():  # where tensors belong to one graph
            return None
        known = self._layers.get(index)
        if known is None or known[0] != self.payload.data_ptr():
            if not 0 <= index < self.num_layers:
                return None
            known = self._layers[index] = self.payload.data_ptr(), self._view_of(index)
        return known[1]

    @cached_property
    def _layers(self) -> dict[int, tuple[int, CacheLayer]]:
        """Layers that were asked for, and where the pool was then."""
        return {}

    def _view_of(self, index: int) -> CacheLayer:
        scales = None if self.scales is None else self.scales[index]
        return CacheLayer(self.codec, self.payload[index], scales, self.tensor_scale)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages in every layer: what `PageAllocator` asks for before a shared page is
        written (`copy_pages([c.source for c in copies], [c.target for c in copies])`)."""
        source, target = (
            from_host(ids, torch.int64, self.device) for ids in (list(sources), list(targets))
        )
        for pool in (self.payload, self.scales):
            if pool is not None and len(source):
                _bits(pool)[:, target] = _bits(pool)[:, source]

    @classmethod
    def allocate(
        cls,
        geometry: MLAGeometry | RowShape,
        format: Format = "bf16",
        *,
        num_pages: int,
        page_size: int = 64,
        num_layers: int = 1,
        tensor_scale: float | Tensor = 1.0,
        device: torch.device | str = "cpu",
    ) -> PagedLatentCache:
        """An empty pool of `num_layers` × `num_pages` × `page_size` rows."""
        dims = Dims("PagedLatentCache.allocate")
        sizes = {"num_pages": num_pages, "page_size": page_size, "num_layers": num_layers}
        for name, size in sizes.items():
            dims.integer(name, size, 1)
        codec = row_codec(known_format(format), _row_shape(geometry))
        _check_tensor_scale(dims, codec, tensor_scale)
        if isinstance(codec, PageFooterCodec):
            storage = torch.zeros(
                num_layers, num_pages, codec.page_bytes(page_size), dtype=torch.uint8, device=device
            )
            payload, scales = _footer_views(storage, codec, page_size)
            return cls(codec, payload, scales, tensor_scale)
        shape = (num_layers, num_pages, page_size)
        payload = torch.zeros(
            *shape, codec.payload_elements, dtype=codec.payload_dtype, device=device
        )
        side = None
        if codec.scale_dtype is not None:
            side = torch.zeros(*shape, codec.scale_elements, dtype=codec.scale_dtype, device=device)
        return cls(codec, payload, side, tensor_scale)

    @classmethod
    def wrap(
        cls,
        blocks: Tensor,
        geometry: MLAGeometry | RowShape,
        *,
        format: Format | None = None,
        scales: Tensor | None = None,
        tensor_scale: float | Tensor = 1.0,
    ) -> PagedLatentCache:
        """See an engine's cache tensor as a pool, sharing its memory.

        blocks  [pages, page, row]                     vLLM
                [pages, page, 1, row]                  FlashMLA; the page stride may be padded
                [pages, 1, layers, page, 1, row]       the documented functions
        scales  the same axes with one float32 column, for format "fp8_token"
        `row` is the geometry's width (bf16, fp16, fp32, fp8), or bytes: 640 (fp8_token) or 656
        (fp8_block128) for 512 + 64 columns, 584 (fp8_block64) for 448 + 64.
        """
        dims = Dims("PagedLatentCache.wrap")
        dims.tensor("blocks", blocks)
        row = _row_shape(geometry)
        named = _infer_format(dims, blocks, row) if format is None else known_format(format)
        codec = row_codec(named, row)
        _check_tensor_scale(dims, codec, tensor_scale)
        nominal = _four_axes(dims, "blocks", _retyped(dims, blocks, codec))
        _check_rows(dims, blocks, nominal, codec)
        dims.match("blocks", nominal, "layers", "pages", "page_size", "row")
        if isinstance(codec, PageFooterCodec):
            _refuse_scales(dims, codec, scales)
            return cls(codec, *_wrap_footer_pages(dims, nominal, codec), tensor_scale)
        if codec.scale_dtype is None:
            _refuse_scales(dims, codec, scales)
            return cls(codec, nominal, None, tensor_scale)
        dims.require(scales is not None, "scales", f"be given for format {codec.name}", None)
        side = _four_axes(dims, "scales", dims.tensor("scales", scales))
        dims.bind("scale", codec.scale_elements, f"the scales of format {codec.name}")
        axes = ("layers", "pages", "page_size", "scale")
        dims.match("scales", side, *axes, dtypes=[codec.scale_dtype])
        return cls(codec, nominal, side, tensor_scale)

    @classmethod
    def wrap_index_keys(cls, blocks: Tensor) -> PagedLatentCache:
        """See an indexer's key cache as a pool, sharing its memory.

        blocks  [pages, page, D + 4] or [pages, page, 1, D + 4] bytes, contiguous pages: the D e4m3
                of every row of a page first, then a float32 scale for each (vLLM, DeepGEMM)

        The pool has format "fp8_token" and rows of D columns, none of them rotated.
        """
        dims = Dims("PagedLatentCache.wrap_index_keys")
        dims.dtype("blocks", dims.tensor("blocks", blocks), *_BYTE_TYPES)
        nominal = _four_axes(dims, "blocks", blocks.view(torch.uint8))
        layers, pages, page_size, width = nominal.shape
        dims.require(
            width > 4 and width % 4 == 0, "blocks", "have rows of D + 4 bytes, D % 4 == 0", width
        )
        dims.require(
            nominal.stride(3) == 1 and (page_size == 1 or nominal.stride(2) == width),
            "blocks",
            "have contiguous pages",
            f"strides {blocks.stride()}",
        )
        start, by_page = nominal.storage_offset(), nominal.stride()[:2]
        dims.require(
            start % 4 == 0 and all(stride % 4 == 0 for stride in by_page),
            "blocks",
            "have pages aligned to 4 bytes",
            f"strides {blocks.stride()} at offset {start}",
        )
        d = width - 4
        payload = nominal.as_strided((layers, pages, page_size, d), (*by_page, d, 1), start)
        run = nominal.as_strided((layers, pages, page_size * width), (*by_page, 1), start)
        scales = run.view(torch.float32)[..., page_size * d // 4 :].unsqueeze(-1)
        return cls(row_codec("fp8_token", RowShape(d, 0)), payload, scales)


class KVShard(NamedTuple):
    """Which tokens of every request one rank of a context-parallel group caches.

    Position p lies on rank (p // interleave) % world; a rank stores its positions in order.
    """

    rank: int
    world: int
    interleave: int = 1

    def local_count(self, num_tokens: int) -> int:
        """How many of the positions [0, num_tokens) are here: also the local index of the next."""
        period = self.interleave * self.world
        full, rest = divmod(num_tokens, period)
        mine = min(max(rest - self.rank * self.interleave, 0), self.interleave)
        return full * self.interleave + mine


WHOLE = KVShard(0, 1)


def _row_shape(geometry: MLAGeometry | RowShape) -> RowShape:
    return geometry.row if isinstance(geometry, MLAGeometry) else geometry


def _check_tensor_scale(dims: Dims, codec: RowCodec, scale: float | Tensor) -> None:
    """Host numbers only: the value of a scale that lives on a device is not looked at."""
    if not codec.has_tensor_scale:
        unit = not isinstance(scale, Tensor) and scale == 1.0
        dims.require(unit, "tensor_scale", f"be left at 1.0 for format {codec.name}", scale)
    elif isinstance(scale, Tensor):
        shape = tuple(scale.shape)
        dims.require(scale.numel() == 1, "tensor_scale", "have one element", f"shape {shape}")
    else:
        dims.require(dims.finite("tensor_scale", scale) > 0, "tensor_scale", "be positive", scale)


def _refuse_scales(dims: Dims, codec: RowCodec, scales: Tensor | None) -> None:
    dims.require(
        scales is None,
        "scales",
        f"be None for format {codec.name}, which keeps none in a tensor of their own",
        "a tensor",
    )


def _check_rows(dims: Dims, blocks: Tensor, nominal: Tensor, codec: RowCodec) -> None:
    """Said of `blocks` as the caller knows them, not of the four axes made of them."""
    width = _row_elements(codec)
    dims.require(
        blocks.shape[-1] == width,
        "blocks",
        f"have rows of {width} (format {codec.name} of {codec.row})",
        f"shape {tuple(blocks.shape)}",
    )
    dims.rows_contiguous("blocks", blocks)
    dims.require(nominal.shape[2] >= 1, "blocks", "have a page size of at least 1", 0)


def _infer_format(dims: Dims, blocks: Tensor, row: RowShape) -> str:
    width = blocks.shape[-1] if blocks.ndim else 0
    if blocks.dtype in _HALF_FORMATS:
        return _HALF_FORMATS[blocks.dtype]
    dims.dtype("blocks", blocks, *_HALF_FORMATS, *_BYTE_TYPES)
    candidates: dict[int, str] = {}
    for name in ("fp8", "fp8_token", "fp8_block128", "fp8_block64"):
        if (codec := _codec_or_none(name, row)) is not None:
            candidates.setdefault(_row_elements(codec), name)
    if width not in candidates:
        known = " or ".join(f"{size} ({name})" for size, name in candidates.items())
        dims.fail("blocks", f"have rows of {known} bytes for {row}", width)
    return candidates[width]


def _codec_or_none(name: str, row: RowShape) -> RowCodec | None:
    try:
        return row_codec(name, row)
    except ValueError:  # a row this format cannot hold
        return None


def _row_elements(codec: RowCodec) -> int:
    """The last axis of a foreign tensor; a footer counts as part of its rows."""
    if isinstance(codec, PageFooterCodec):
        return codec.bytes_per_token
    return codec.payload_elements


def _retyped(dims: Dims, blocks: Tensor, codec: RowCodec) -> Tensor:
    """Byte rows come as uint8, int8 or e4m3; the element size is the same, so a view does."""
    if blocks.dtype in _BYTE_TYPES and codec.payload_dtype in _BYTE_TYPES:
        return blocks.view(codec.payload_dtype)
    dims.dtype("blocks", blocks, codec.payload_dtype)
    return blocks


def _four_axes(dims: Dims, arg: str, blocks: Tensor) -> Tensor:
    """[layers, pages, page_size, row] of any of the shapes `wrap` takes."""
    if blocks.ndim == 3:
        return blocks.unsqueeze(0)
    if blocks.ndim == 4:
        dims.require(blocks.shape[2] == 1, f"{arg}.shape[2]", "be one KV head", blocks.shape[2])
        return blocks.squeeze(2).unsqueeze(0)
    dims.require(
        blocks.ndim == 6, arg, "have 3, 4 or 6 axes (see PagedLatentCache.wrap)", blocks.ndim
    )
    for axis in (1, 4):
        dims.require(blocks.shape[axis] == 1, f"{arg}.shape[{axis}]", "be 1", blocks.shape[axis])
    return blocks[:, 0, :, :, 0].transpose(0, 1)


def _footer_views(storage: Tensor, codec: RowCodec, page_size: int) -> tuple[Tensor, Tensor]:
    """Rows and scales of pages [layers, pages, page_bytes]: all rows first, then all scales."""
    layers, pages, _ = storage.shape
    by_page = storage.stride()[:2]
    start = storage.storage_offset()
    row_bytes, scale_bytes = codec.payload_elements, codec.scale_elements
    payload = storage.as_strided(
        (layers, pages, page_size, row_bytes), (*by_page, row_bytes, 1), start
    )
    scales = storage.as_strided(
        (layers, pages, page_size, scale_bytes),
        (*by_page, scale_bytes, 1),
        start + page_size * row_bytes,
    )
    return payload, scales


def _wrap_footer_pages(dims: Dims, nominal: Tensor, codec: RowCodec) -> tuple[Tensor, Tensor]:
    """A page of [page_size, 584] is one run of bytes; its nominal rows are not where tokens lie."""
    layers, pages, page_size, width = nominal.shape
    dims.require(
        page_size == 1 or nominal.stride(2) == width,
        "blocks",
        f"have contiguous pages, a row every {width} bytes",
        f"one every {nominal.stride(2)}",
    )
    run = nominal.as_strided(
        (layers, pages, page_size * width), (*nominal.stride()[:2], 1), nominal.storage_offset()
    )
    return _footer_views(run, codec, page_size)


def request_slots(
    page_table: PageTable, page_size: int, request: int, first: int, last: int
) -> Tensor:
    """int64 slots of tokens [first, last) of one request."""
    if isinstance(page_table, tuple):
        starts, flat = page_table
        start = int(starts[request])
        return flat[start + first : start + last].long()
    token = torch.arange(first, last, device=page_table.device)
    # only the pages of these tokens are looked at: later entries may be garbage
    return page_table[request, token // page_size].long() * page_size + token % page_size


def token_slots(page_table: PageTable, page_size: int, request: Tensor, position: Tensor) -> Tensor:
    """int64 slots of tokens given by their request and position, both int64 [tokens]."""
    if isinstance(page_table, tuple):
        starts, flat = page_table
        return flat[starts.long()[request] + position].long()
    page = page_table[request, position // page_size].long()
    return page * page_size + position % page_size


def token_requests(q_starts: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """For each token of a ragged batch: its request, and its index within that request (int64)."""
    starts = q_starts.long()
    token = torch.arange(num_tokens, device=starts.device)
    # the last start not above the token: empty requests before it are passed over
    request = torch.searchsorted(starts, token, right=True) - 1
    return request, token - starts[request]


def token_positions(kv_lens: Tensor, q_starts: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """For each new token of a ragged batch: its request, and its position there (int64).

    kv_lens  [batch] tokens of each request, the new ones included: they are its newest
    """
    request, index = token_requests(q_starts, num_tokens)
    first = kv_lens.long() - q_starts.long().diff()
    return request, first[request] + index


def physical_rows(
    tokens: Tensor, page_table: Tensor, page_size: int, q_starts: Tensor | None = None
) -> Tensor:
    """int32 rows for `sparse_mla` of the token positions an indexer chose.

    tokens  [queries, topk] positions within the query's request; negative ones become −1, and so do
            positions beyond the page table
    """
    request = (
        torch.arange(len(tokens), device=tokens.device)
        if q_starts is None
        else token_requests(q_starts, len(tokens))[0]
    )
    column = torch.div(tokens, page_size, rounding_mode="floor").long()
    inside = (tokens >= 0) & (column < page_table.shape[1])
    page = page_table[request[:, None], torch.where(inside, column, 0)]
    row = page * page_size + tokens % page_size
    return torch.where(inside & (page >= 0), row, -1).int()


def gather_rows(
    layer: CacheLayer,
    page_table: PageTable,
    first: Sequence[int],
    last: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """(rows [n, width] of tokens [first, last) of every request, kv_starts int32 [batch + 1])."""
    device = layer.payload.device
    counts = [high - low for low, high in zip(first, last, strict=True)]
    kv_starts = from_host([0, *accumulate(counts)], torch.int32, device)
    request, index = token_requests(kv_starts, sum(counts))
    position = from_host(list(first), torch.int64, device)[request] + index
    slots = token_slots(page_table, layer.page_size, request, position)
    return layer.read(slots, dtype), kv_starts


def select_requests(
    page_table: PageTable, requests: Sequence[int], tokens: Sequence[int] | None = None
) -> PageTable:
    """The page table of some requests of a batch, in the order given.

    tokens  of each of them, all that a flat table then keeps; None keeps all it has, which on a GPU
            waits for the bounds
    """
    if not isinstance(page_table, tuple):
        index = from_host(list(requests), torch.int64, page_table.device)
        return page_table.index_select(0, index)
    starts, slots = page_table
    chosen = from_host(list(requests), torch.int64, starts.device)
    if tokens is None:
        tokens = starts.diff()[chosen].tolist()
    new_starts = from_host([0, *accumulate(tokens)], starts.dtype, starts.device)
    request, index = token_requests(new_starts, sum(tokens))
    return new_starts, slots[starts.long()[chosen[request]] + index]
