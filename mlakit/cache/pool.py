"""The storage of a paged latent cache: a pool of pages, and one layer of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mlakit.cache.layer_views import CacheTensors, LayerViews, can_cache_views
from mlakit.cache.layouts import (
    as_integers,
    bits,
    check_rows,
    four_axes,
    infer_format,
    new_tensors,
    refuse_scales,
    view_as_payload,
    wrap_footer_pages,
    wrap_index_key_pages,
)
from mlakit.cache.page_table import (
    PageTable,
    from_host,
    range_slots,
    request_slots,
)
from mlakit.cache.pages import PageCopy
from mlakit.cache.slot_checks import (
    SKIPPED,
    check_rows_for_slots,
    check_slot_values,
    check_slots,
    check_slots_unique,
)
from mlakit.cache.split_views import split_views
from mlakit.dispatch.checks import FLOATS, Dims, refuse_gradient, refuse_tangent, values_visible
from mlakit.formats import (
    Format,
    PageFooterCodec,
    RowCodec,
    format_of_dtype,
    known_format,
    row_codec,
    split_format,
)
from mlakit.model.geometry import MLAGeometry, RowShape

# elements; torch copies a slice of 2**15 with one thread, and slices just below that gain less
GATHER_ELEMENTS = 2**14


@dataclass(frozen=True, eq=False, repr=False)
class CacheLayer(CacheTensors):
    """One layer of a pool: what an attention kernel takes."""

    codec: RowCodec
    payload: Tensor  # [num_pages, page_size, codec.payload_elements]
    beside: Tensor | None  # [num_pages, page_size, codec.beside_elements]
    tensor_scale: float | Tensor = 1.0

    @property
    def page_size(self) -> int:
        """Rows per page."""
        return self.payload.shape[1]

    @property
    def as_pool(self) -> PagedLatentCache:
        """A pool with this layer only, in the same memory."""
        beside = None if self.beside is None else self.beside[None]
        return PagedLatentCache(self.codec, self.payload[None], beside, self.tensor_scale)

    @property
    def num_slots(self) -> int:
        """Rows of the layer; slots are in [0, num_slots)."""
        return self.payload.shape[0] * self.payload.shape[1]

    def check_writable(self, dims: Dims, arg: str = "cache") -> None:
        """Require that no two rows share memory, as in a pool wrapped from an expanded tensor."""
        dims.not_overlapping(f"the payload of {arg}", self.payload)
        if self.beside is not None:
            name = "rope columns" if self.codec.is_split else "scales"
            dims.not_overlapping(f"the {name} of {arg}", self.beside)

    def read(self, slots: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows [..., width] at int32 or int64 `slots` [...], dequantised.

        A slot outside [0, num_slots), including -1, raises ValueError. On a GPU this needs
        `knobs.check_values`; without it the row of such a slot is NaN.
        """
        dims = Dims("CacheLayer.read")
        check_slots(dims, slots, self.payload, self.num_slots)
        if dtype not in (*FLOATS, torch.float64):
            allowed = "bfloat16, float16, float32 or float64"
            raise TypeError(f"{dims.op}: dtype must be {allowed}, got {dtype}")
        if values_visible(slots):
            check_slot_values(dims, slots, self.num_slots, minimum=0)
            return self.read_unchecked(slots, dtype)
        inside = (slots >= 0) & (slots < self.num_slots)
        rows = self.read_unchecked(torch.where(inside, slots, 0), dtype)
        return rows.masked_fill(~inside.unsqueeze(-1), torch.nan)

    def read_unchecked(
        self, slots: Tensor, dtype: torch.dtype = torch.float32, *, run: int = 1
    ) -> Tensor:
        """`read` without checks, for slots that are known to be in [0, num_slots).

        run  rows from each slot on, next to each other along the last axis of slots; slots are
             multiples of it, and the payload is contiguous if it is not 1
        """
        payload = _take_rows(bits(self.payload), slots, run).view(self.payload.dtype)
        beside = None
        if self.beside is not None:
            beside = _take_rows(bits(self.beside), slots, run).view(self.beside.dtype)
        return self.codec.decode(payload, beside, tensor_scale=self.tensor_scale, dtype=dtype)

    def read_tokens(self, page_table: PageTable, request: int, first: int, last: int) -> Tensor:
        """Rows [last − first, width] float32 of tokens [first, last) of one request, dequantised.

        Gathers whole pages. Tokens of a single page are not copied before they are dequantised.
        """
        if isinstance(page_table, tuple):
            slots = request_slots(page_table, self.page_size, request, first, last)
            return self.read_unchecked(slots)
        pages = page_table[request, first // self.page_size : -(-last // self.page_size)]
        offset = first % self.page_size

        def tokens(pool: Tensor) -> Tensor:
            if len(pages) == 1:
                return pool[int(pages), offset : offset + last - first]
            return _gather_pages(pool, pages)[offset : offset + last - first]

        beside = None if self.beside is None else tokens(self.beside)
        return self.codec.decode(tokens(self.payload), beside, tensor_scale=self.tensor_scale)

    def write(self, slots: Tensor, rows: Tensor, *, power_of_two_scales: bool = False) -> None:
        """Quantise `rows` [..., width] into int32 or int64 `slots` [...], one row per slot.

        Slot -1 is skipped. Any other slot outside [0, num_slots) and a duplicate slot raise
        ValueError, and nothing is written. On a GPU this needs `knobs.check_values`; without it
        every slot outside the pool is skipped, and a duplicate slot gets a mix of its rows.
        """
        dims = Dims("CacheLayer.write")
        self.check_writable(dims, "the layer")
        check_slots(dims, slots, self.payload, self.num_slots)
        check_rows_for_slots(dims, slots, rows, self.codec.row.width)
        refuse_gradient(dims.op, "rows", rows)
        if not torch.compiler.is_compiling():
            refuse_tangent(dims.op, "rows", rows)
        if slots.numel() == 0:
            return
        visible = values_visible(slots)
        if visible:
            check_slot_values(dims, slots, self.num_slots, minimum=SKIPPED)
        slots, rows = slots.reshape(-1), rows.reshape(-1, rows.shape[-1])
        if not visible:
            self._write_inside(slots, rows, power_of_two_scales)
            return
        check_slots_unique(dims, slots)
        kept = slots != SKIPPED
        if not bool(kept.all()):
            slots, rows = slots[kept], rows[kept]
        self.write_unchecked(slots, rows, power_of_two_scales=power_of_two_scales)

    def write_unchecked(
        self, slots: Tensor, rows: Tensor, *, power_of_two_scales: bool = False
    ) -> None:
        """`write` without checks, for slots that are known to be in [0, num_slots)."""
        self._store(slots, *self._encoded(rows, power_of_two_scales))

    def _write_inside(self, slots: Tensor, rows: Tensor, power_of_two: bool) -> None:
        """Skip the slots outside the pool without reading them on the host."""
        inside = (slots >= 0) & (slots < self.num_slots)
        index = torch.arange(len(slots), device=slots.device)
        # a skipped entry repeats another write: the same bytes to the same slot
        index = torch.where(inside, index, inside.int().argmax())
        payload, beside = self._encoded(rows[index], power_of_two)
        # if all are skipped, row 0 is overwritten with its own bytes
        any_inside = inside.any()
        payload = torch.where(any_inside, as_integers(payload), as_integers(self.payload)[0, 0])
        if self.beside is not None and beside is not None:
            beside = torch.where(any_inside, as_integers(beside), as_integers(self.beside)[0, 0])
        self._store(torch.where(any_inside, slots[index], 0), payload, beside)

    def _encoded(self, rows: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor | None]:
        return self.codec.encode(rows, tensor_scale=self.tensor_scale, power_of_two=power_of_two)

    def _store(self, slots: Tensor, payload: Tensor, beside: Tensor | None) -> None:
        page, offset = slots // self.page_size, slots % self.page_size
        as_integers(self.payload)[page, offset] = as_integers(payload)
        if self.beside is not None and beside is not None:
            as_integers(self.beside)[page, offset] = as_integers(beside)


def _gather_pages(pool: Tensor, pages: Tensor) -> Tensor:
    """The rows of `pages`, concatenated: [pages · page_size, columns].

    `index_select` uses several threads only for small slices: contiguous pages are therefore
    gathered in equal slices of at most `GATHER_ELEMENTS`.
    """
    _, page_size, columns = pool.shape
    sizes = (size for size in range(page_size, 0, -1) if page_size % size == 0)
    rows = next((size for size in sizes if size * columns <= GATHER_ELEMENTS), 1)
    per_page = page_size // rows
    if per_page == 1 or not pool.is_contiguous():
        return pool.index_select(0, pages).flatten(0, 1)
    index = pages.long()[:, None] * per_page + torch.arange(per_page, device=pages.device)
    slices = pool.view(-1, rows * columns)
    return slices.index_select(0, index.flatten()).view(-1, columns)


@dataclass(frozen=True, eq=False, repr=False)
class PagedLatentCache(CacheTensors):
    """A pool of latent rows; `allocate` creates one, `wrap` views an engine's tensor as one."""

    codec: RowCodec
    payload: Tensor  # [num_layers, num_pages, page_size, codec.payload_elements], any strides
    beside: Tensor | None  # [num_layers, num_pages, page_size, codec.beside_elements]
    tensor_scale: float | Tensor = 1.0  # format "fp8": stored value = value / tensor_scale

    @property
    def row(self) -> RowShape:
        """The columns of a row."""
        return self.codec.row

    @property
    def format(self) -> str:
        """The name of the row format."""
        return self.codec.name

    @property
    def num_layers(self) -> int:
        """Layers, which share the page tables."""
        return self.payload.shape[0]

    @property
    def num_pages(self) -> int:
        """Pages per layer."""
        return self.payload.shape[1]

    @property
    def page_size(self) -> int:
        """Rows per page."""
        return self.payload.shape[2]

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.payload.device

    def layer(self, index: int) -> CacheLayer:
        """One layer of the pool, in the same memory; ValueError if there is no such layer."""
        if type(index) is not int:
            index = Dims("PagedLatentCache.layer").integer("index", index, 0)
        if not 0 <= index < self.num_layers:
            raise ValueError(
                f"PagedLatentCache.layer: index must be in [0, {self.num_layers}), got {index}"
            )
        return self.find_layer(index) or self._view_of(index)

    def find_layer(self, index: int) -> CacheLayer | None:
        """The cached view of a layer: the same object as long as the pool's memory is the same.

        None if there is no such layer and if views cannot be cached: tensors that require grad or
        have no memory of their own, while torch.compile traces and where tensors have tangents.
        """
        # a traced tensor belongs to one graph, and a cached view has no tangent
        if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
            return None
        views: LayerViews[CacheLayer] | None = self.__dict__.get("_views")
        if views is None or not views.is_current(self):
            vars(self).pop("_views", None)  # frees the old memory
            if not can_cache_views(self):
                return None
            views = vars(self)["_views"] = LayerViews(self)
        layer = views.layers.get(index)
        if layer is None and 0 <= index < self.num_layers:
            layer = self._detached_view_of(index)
            if layer is not None:
                views.layers[index] = layer
        return layer

    def _detached_view_of(self, index: int) -> CacheLayer | None:
        """A view of the pool's memory that holds no reference to its tensors."""
        payload = self.payload[index].detach()
        beside = None if self.beside is None else self.beside[index].detach()
        if type(payload) is not Tensor:  # a dispatch mode returned a subclass
            return None
        return CacheLayer(self.codec, payload, beside, self.tensor_scale)

    def _view_of(self, index: int) -> CacheLayer:
        beside = None if self.beside is None else self.beside[index]
        return CacheLayer(self.codec, self.payload[index], beside, self.tensor_scale)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and their scales, without padding between or after pages."""
        return self.payload.nbytes + (0 if self.beside is None else self.beside.nbytes)

    def to(
        self, device: torch.device | str | int, *, non_blocking: bool = False
    ) -> PagedLatentCache:
        """The pool on `device`: itself if it is there already, otherwise a contiguous copy."""
        dims = Dims("PagedLatentCache.to")
        if not isinstance(device, (torch.device, str, int)) or isinstance(device, bool):
            got = type(device).__name__
            raise TypeError(f"{dims.op}: device must be a device or its name, got {got}")
        # "cuda" means the current device
        there = torch.empty(0, dtype=torch.uint8, device=device).device
        scale = self.tensor_scale
        if isinstance(scale, Tensor):
            scale = scale.to(there, non_blocking=non_blocking)
        if there != self.device:
            return self._copied(there, scale, non_blocking)
        return self if scale is self.tensor_scale else replace(self, tensor_scale=scale)

    def clone(self) -> PagedLatentCache:
        """A copy in the layout of `allocate`; a `tensor_scale` tensor is copied as well."""
        scale = self.tensor_scale
        return self._copied(self.device, scale.clone() if isinstance(scale, Tensor) else scale)

    def grown(self, num_pages: int) -> PagedLatentCache:
        """A pool with `num_pages` pages per layer and the rows of this one; new pages are empty.

        It copies all rows into new memory, in the layout of `allocate`: both pools exist until this
        one is dropped. Slots and page ids stay valid (`PageAllocator.grow`).
        """
        dims = Dims("PagedLatentCache.grown")
        total = dims.integer("num_pages", num_pages, 1)
        must = f"not be below the {self.num_pages} pages of the pool"
        dims.require(total >= self.num_pages, "num_pages", must, total)
        if self.beside is not None:
            own, needed = tuple(self.beside.shape[1:3]), (self.num_pages, self.page_size)
            dims.require(own == needed, "scales", f"have pages like the rows, {needed}", own)
        rows = (self.num_layers, total, self.page_size)
        payload, beside = new_tensors(self.codec, rows, device=self.device)
        for copied, pool in ((payload, self.payload), (beside, self.beside)):
            if copied is not None and pool is not None:
                bits(copied)[:, : self.num_pages].copy_(bits(pool))
        return PagedLatentCache(self.codec, payload, beside, self.tensor_scale)

    def zero_(self) -> PagedLatentCache:
        """Set all rows and their scales to zero, as in a new pool; `tensor_scale` is kept."""
        for pool in (self.payload, self.beside):
            if pool is not None:
                bits(pool).zero_()
        return self

    def _copied(
        self, device: torch.device, tensor_scale: float | Tensor, non_blocking: bool = False
    ) -> PagedLatentCache:
        payload, beside = new_tensors(
            self.codec,
            self.payload.shape[:3],
            beside_rows=None if self.beside is None else self.beside.shape[:3],
            device=device,
            make=torch.empty,
        )
        for copied, pool in ((payload, self.payload), (beside, self.beside)):
            if copied is not None and pool is not None:
                bits(copied).copy_(bits(pool), non_blocking=non_blocking)
        return PagedLatentCache(self.codec, payload, beside, tensor_scale)

    def copy_pages(self, copies: Iterable[PageCopy | tuple[int, int]]) -> None:
        """Copy whole pages in every layer, for copy on write of shared pages.

        copies  what `PageAllocator` returns, or pairs (source, target) of page ids

        A duplicate target and a target that is also a source raise ValueError.
        """
        dims = Dims("PagedLatentCache.copy_pages")
        sources: list[int] = []
        targets: list[int] = []
        for i, copy in enumerate(copies):
            if not isinstance(copy, (tuple, list)) or len(copy) not in (2, len(PageCopy._fields)):
                raise TypeError(
                    f"{dims.op}: copies[{i}] must be a PageCopy or a pair (source, target), "
                    f"got {copy!r}"
                )
            sources.append(self._page_id(dims, f"the source of copies[{i}]", copy[0]))
            targets.append(self._page_id(dims, f"the target of copies[{i}]", copy[1]))
        if not sources:
            return
        taken = set(sources)
        for i, page in enumerate(targets):
            arg = f"the target of copies[{i}]"
            dims.require(page not in taken, arg, "not be a source or another target", page)
            taken.add(page)
        source, target = (
            from_host(pages, torch.int64, self.device) for pages in (sources, targets)
        )
        for pool in (self.payload, self.beside):
            if pool is not None:
                bits(pool)[:, target] = bits(pool)[:, source]

    def _page_id(self, dims: Dims, arg: str, page: object) -> int:
        number = dims.integer(arg, page, 0)
        below = f"be below the {self.num_pages} pages of the pool"
        dims.require(number < self.num_pages, arg, below, number)
        return number

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
        codec = row_codec(known_format(format), _row_shape(dims, geometry))
        tensor_scale = _checked_tensor_scale(dims, codec, tensor_scale)
        rows = (num_layers, num_pages, page_size)
        return cls(codec, *new_tensors(codec, rows, device=device), tensor_scale)

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
        """View an engine's cache tensor as a pool, in the same memory.

        blocks  [pages, page, row]                     vLLM
                [pages, page, 1, row]                  FlashMLA; the page stride may be padded
                [pages, 1, layers, page, 1, row]       MAX
        scales  the same axes with one float32 column, for format "fp8_token"; with one per group
                of columns for `mlakit.formats.GROUP_FORMATS`, which `format` must name
        `row` is the geometry's width (bf16, fp16, fp32, fp8), or bytes: 640 (fp8_token) or 656
        (fp8_block128) for 512 + 64 columns, 584 (fp8_block64) for 448 + 64.
        """
        dims = Dims("PagedLatentCache.wrap")
        dims.tensor("blocks", blocks)
        row = _row_shape(dims, geometry)
        named = infer_format(dims, blocks, row) if format is None else known_format(format)
        codec = row_codec(named, row)
        joined = "name rows in one tensor (wrap_split takes two)"
        dims.require(not codec.is_split, "format", joined, named)
        tensor_scale = _checked_tensor_scale(dims, codec, tensor_scale)
        nominal = four_axes(dims, "blocks", view_as_payload(dims, blocks, codec))
        check_rows(dims, blocks, nominal, codec)
        dims.match("blocks", nominal, "layers", "pages", "page_size", "row")
        if isinstance(codec, PageFooterCodec):
            refuse_scales(dims, codec, scales)
            return cls(codec, *wrap_footer_pages(dims, nominal, codec), tensor_scale)
        if codec.beside_dtype is None:
            refuse_scales(dims, codec, scales)
            return cls(codec, nominal, None, tensor_scale)
        dims.require(scales is not None, "scales", f"be given for format {codec.name}", None)
        side = four_axes(dims, "scales", dims.tensor("scales", scales))
        dims.bind("scale", codec.beside_elements, f"the scales of format {codec.name}")
        axes = ("layers", "pages", "page_size", "scale")
        dims.match("scales", side, *axes, dtypes=[codec.beside_dtype])
        return cls(codec, nominal, side, tensor_scale)

    @classmethod
    def wrap_split(
        cls, ckv: Tensor, kpe: Tensor, *, tensor_scale: float | Tensor = 1.0
    ) -> PagedLatentCache:
        """View latent and rotated columns that an engine has in two tensors as a pool.

        ckv           [pages, page_size, D_C] bf16, fp16, fp32 or e4m3 (also as bytes)
        kpe           [pages, page_size, D_R] of the same dtype, on the same device
        tensor_scale  of both, where they are e4m3

        Nothing is copied. Each tensor has strides of its own, with a contiguous last axis, and they
        share no element. The format of the pool is `bf16_split`, `fp16_split`, `fp32_split` or
        `fp8_split`; where both are views of the columns of joined rows, or D_R is 0, it is that of
        the joined rows.
        """
        dims = Dims("PagedLatentCache.wrap_split")
        payload, beside = split_views(dims, ckv, kpe)
        row = RowShape(ckv.shape[2], kpe.shape[2])
        name = format_of_dtype(payload.dtype)
        codec = row_codec(name if beside is None else split_format(name), row)
        tensor_scale = _checked_tensor_scale(dims, codec, tensor_scale)
        return cls(codec, payload[None], None if beside is None else beside[None], tensor_scale)

    @classmethod
    def wrap_index_keys(cls, blocks: Tensor) -> PagedLatentCache:
        """View an indexer's key cache as a pool, in the same memory.

        blocks  [pages, page, D + 4] or [pages, page, 1, D + 4] bytes, contiguous pages: first the
                D e4m3 of every row of a page, then one float32 scale per row (vLLM, DeepGEMM)

        The pool has format "fp8_token" and rows of D columns without RoPE columns.
        """
        dims = Dims("PagedLatentCache.wrap_index_keys")
        d, payload, scales = wrap_index_key_pages(dims, blocks)
        return cls(row_codec("fp8_token", RowShape(d, 0)), payload, scales)


def _row_shape(dims: Dims, geometry: MLAGeometry | RowShape) -> RowShape:
    if isinstance(geometry, MLAGeometry):
        return geometry.row
    if isinstance(geometry, RowShape):
        return geometry
    got = type(geometry).__name__
    raise TypeError(f"{dims.op}: geometry must be an MLAGeometry or a RowShape, got {got}")


def _checked_tensor_scale(dims: Dims, codec: RowCodec, scale: float | Tensor) -> float | Tensor:
    if not codec.has_tensor_scale:
        unit = not isinstance(scale, Tensor) and scale == 1.0
        dims.require(unit, "tensor_scale", f"be left at 1.0 for format {codec.name}", scale)
        return 1.0
    return dims.scale("tensor_scale", scale)


def _take_rows(pool: Tensor, slots: Tensor, run: int = 1) -> Tensor:
    """pool [pages, page size, columns] at `slots`, [..., columns]; `run` rows from each slot on."""
    pages, page_size, columns = pool.shape
    if run > 1 and pool.is_contiguous():
        runs = pool.view(-1, run * columns).index_select(0, slots.reshape(-1) // run)
        return runs.view(*slots.shape[:-1], slots.shape[-1] * run, columns)
    if run > 1:
        slots = (slots[..., None] + torch.arange(run, device=slots.device)).flatten(-2)
    if pool.stride(0) == page_size * pool.stride(1):  # rows of one stride: a faster kernel
        rows = pool.as_strided((pages * page_size, columns), pool.stride()[1:])
        return rows.index_select(0, slots.reshape(-1)).view(*slots.shape, columns)
    return pool[slots // page_size, slots % page_size]


def gather_rows(
    layer: CacheLayer,
    page_table: PageTable,
    first: Sequence[int],
    last: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """(rows [n, width] of tokens [first, last) of every request, kv_starts int32 [batch + 1])."""
    slots, kv_starts = range_slots(page_table, layer.page_size, first, last, layer.payload.device)
    return layer.read_unchecked(slots, dtype), kv_starts
