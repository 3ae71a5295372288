"""The schedule of a decode batch, as a frozen object made from lengths alone.

`plan_decode` splits the keys of a batch among persistent CTAs (`plan.split_heuristic`). Equal
lengths give equal plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count
from typing import NamedTuple

import torch
from torch import Tensor

from mlakit.dispatch.checks import Dims
from mlakit.dispatch.reprs import shapes_repr
from mlakit.plan.split_heuristic import ceil_div, split_tiles

MAX_INT32 = 2**31 - 1


class WorkItem(NamedTuple):
    """One split: keys [first_key, last_key) of one request, attended to by one persistent CTA.

    `partial_slot` is the scratch slot of the split's partial (out, lse). It is -1 if the request is
    not split: the CTA then writes the final result.
    """

    cta: int
    request: int
    first_key: int
    last_key: int
    partial_slot: int


class DecodePlanTensors(NamedTuple):
    """A `DecodePlan` for kernels: int32 tensors, and the sizes a launcher needs on the host.

    CTA c computes `items[cta_starts[c]:cta_starts[c + 1]]`. In a plan made on a device, `items` may
    be longer than the items in use, and the last item of a request may end past its last key, at
    the end of a tile.
    """

    items: Tensor  # [max_items, 4 or more]: request, first_key, last_key, partial_slot, …
    cta_starts: Tensor  # [num_ctas + 1] offsets into items
    partial_starts: Tensor  # [batch + 1] offsets into the partial slots
    empty_requests: Tensor  # [num_empty] requests without keys: no item, but maybe queries
    tile: int  # keys per tile; items start at multiples of it
    max_partials: int  # partial slots; the scratch has max_partials · slot_rows rows of out
    slot_rows: int = 0  # query rows (queries × heads) per partial slot; 0: the kernel chooses
    num_tokens: int = 0  # query tokens the plan was made for; 0: any number

    def __repr__(self) -> str:
        return shapes_repr(self)

    @classmethod
    def room(
        cls,
        out: DecodePlanTensors | None,
        make: Callable[..., Tensor],
        *,
        max_items: int,
        columns: int,
        num_ctas: int,
        batch: int,
        tile: int,
        max_partials: int,
        slot_rows: int,
        num_tokens: int,
    ) -> DecodePlanTensors:
        """A plan to be filled in that leaves no request out: `out`, or new tensors.

        make  make(*shape) -> new int32 tensor

        Raises ValueError if `out` has other sizes.
        """
        shapes = ((max_items, columns), (num_ctas + 1,), (batch + 1,), (0,))
        sizes = (tile, max_partials, slot_rows, num_tokens)
        if out is None:
            items, cta_starts, partial_starts, empty = (make(*shape) for shape in shapes)
            return cls(items, cta_starts, partial_starts, empty, *sizes)
        if tuple(tuple(tensor.shape) for tensor in out[:4]) == shapes and out[4:] == sizes:
            return out
        raise ValueError(
            "plan_mla_decode: out must be a plan of as many requests, query tokens and heads for "
            f"the same kernel, got one of {out.partial_starts.shape[0] - 1} requests, "
            f"{out.num_tokens} query tokens, {out.cta_starts.shape[0] - 1} CTAs and tiles of "
            f"{out.tile} keys instead of {batch}, {num_tokens}, {num_ctas} and {tile}"
        )

    def host_items(self) -> list[tuple[int, int, int, int]]:
        """Return (request, first_key, last_key, partial_slot) of the items in use. Synchronises."""
        return [tuple(item) for item in self.items[: int(self.cta_starts[-1]), :4].tolist()]


@dataclass(frozen=True)
class DecodePlan:
    """A split-KV schedule. CTA c computes `items[cta_starts[c]:cta_starts[c + 1]]`.

    kv_lens         the lengths the plan was made for
    num_ctas        persistent CTAs, some of which may have no item; a kernel launches one for each
                    tile of query rows, all with the same items
    tile            keys per tile: an item has a whole number of tiles, except the last of a request
    fixed_split     keys per split; None if the heuristic chooses the splits
    items           every key of every request once, ordered by request, then by key; CTAs take the
                    items in this order
    cta_starts      [num_ctas + 1] offsets into `items`
    partial_starts  [batch + 1]: the result of request b is merged from the partial slots
                    partial_starts[b] to partial_starts[b + 1]; none if the request is not split
    empty_requests  requests without keys: they have no item, and get out = 0 and lse = -inf
    """

    kv_lens: tuple[int, ...]
    num_ctas: int
    tile: int
    fixed_split: int | None
    items: tuple[WorkItem, ...]
    cta_starts: tuple[int, ...]
    partial_starts: tuple[int, ...]
    empty_requests: tuple[int, ...]

    @property
    def num_partials(self) -> int:
        """Partial slots: at most two per CTA, unless `fixed_split` is set."""
        return self.partial_starts[-1]

    def tensors(self, device: torch.device | str | None = None) -> DecodePlanTensors:
        """The plan as int32 tensors on `device`, cached per device: do not write to them."""
        if torch.compiler.is_compiling():  # a traced tensor belongs to one graph
            return self._copied_to(device)
        if isinstance(device, torch.device) and device.index is not None:
            where = device
        else:  # "cuda" and None mean the current device
            where = torch.empty(0, dtype=torch.uint8, device=device).device
        if where not in self._on_devices:
            self._on_devices[where] = self._copied_to(device)
        return self._on_devices[where]

    @cached_property
    def _on_devices(self) -> dict[torch.device, DecodePlanTensors]:
        return {}

    def _copied_to(self, device: torch.device | str | None) -> DecodePlanTensors:
        def int32(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int32, device=device)

        columns = (value for item in self.items for value in item[1:])
        return DecodePlanTensors(
            items=int32(columns).reshape(len(self.items), 4),
            cta_starts=int32(self.cta_starts),
            partial_starts=int32(self.partial_starts),
            empty_requests=int32(self.empty_requests),
            tile=self.tile,
            max_partials=self.num_partials,
        )


@dataclass(frozen=True)
class EvenSplit:
    """`num_splits` equal splits of every request: a plan that does not depend on lengths."""

    num_splits: int

    def __post_init__(self) -> None:
        Dims("EvenSplit").integer("num_splits", self.num_splits, 1)


def plan_decode(
    kv_lens: Sequence[int], *, num_ctas: int, tile: int = 64, fixed_split: int | None = None
) -> DecodePlan:
    """Split the keys of a decode batch among `num_ctas` persistent CTAs.

    Requests are split evenly if that loads no CTA with more than 1.1 times the mean load, and
    otherwise so that all CTAs have the same number of tiles, within one
    (`plan.split_heuristic` has the rules). Requests of equal length then get equal splits, and
    the scratch has at most 2 · num_ctas partial slots.

    With `fixed_split` (keys, a multiple of `tile`) a request has a split every `fixed_split` keys.
    Its splits, and the rounding of its result, then depend on its own length alone. The load of a
    CTA differs from the mean load by less than one split.

    Kernels split no request that has more than 8 queries.

    Raises TypeError for what is no integer, ValueError for a negative length and sizes below 1.
    """
    dims = Dims("plan_decode")
    lengths = dims.integers("kv_lens", kv_lens, 0)
    num_ctas = dims.integer("num_ctas", num_ctas, 1)
    tile = dims.integer("tile", tile, 1)
    if fixed_split is not None:
        fixed_split = dims.integer("fixed_split", fixed_split, 1)
        multiple = fixed_split % tile == 0
        dims.require(multiple, "fixed_split", f"be a multiple of tile, {tile}", fixed_split)
    tiles = [ceil_div(kv_len, tile) for kv_len in lengths]
    ranges = [
        (cta, request, first * tile, min(last * tile, lengths[request]))
        for cta, request, first, last in split_tiles(
            tiles, num_ctas, None if fixed_split is None else fixed_split // tile
        )
    ]
    num_splits = Counter(request for _, request, _, _ in ranges)
    slots = count()
    items = tuple(
        WorkItem(*keys, partial_slot=next(slots) if num_splits[keys[1]] > 1 else -1)
        for keys in ranges
    )
    items_per_cta = Counter(item.cta for item in items)
    partials = [num_splits[b] if num_splits[b] > 1 else 0 for b in range(len(lengths))]
    return DecodePlan(
        kv_lens=lengths,
        num_ctas=num_ctas,
        tile=tile,
        fixed_split=fixed_split,
        items=items,
        cta_starts=tuple(accumulate((items_per_cta[c] for c in range(num_ctas)), initial=0)),
        partial_starts=tuple(accumulate(partials, initial=0)),
        empty_requests=tuple(b for b, kv_len in enumerate(lengths) if kv_len == 0),
    )
