"""Registration with torch.library, and how objects travel through an op that takes tensors only.

Each public function has one body that validates, selects, allocates and launches; `@op` stands
above it. Called eagerly with plain tensors it runs, or its launches are replayed
(`launch_cache`): going through the dispatcher would cost a decode call microseconds. Under
torch.compile, under a dispatch mode (fake tensors, make_fx) and with tensors that are not plain
(wrapper subclasses, such as the result of a functional collective) the call goes to
`torch.ops.mlakit.<name>`, whose implementation unpacks its tensors, numbers and strings and runs
the same body: every call is checked alike.

There are no derivatives. Backward mode is refused before a body runs. Forward mode and torch.vmap
are refused by the dispatcher's keys for them, where the tensors of each nested transform of
torch.func appear: a kernel below would get plain tensors, and its results would have no tangents.

A body takes a record of `kernels.arguments`. The types of its fields say how they are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from mlakit.cache import CacheLayer, KVShard, PageTable
from mlakit.dispatch import private
from mlakit.dispatch.autocast import without_autocast
from mlakit.formats import row_codec
from mlakit.kernels.arguments import Splits, WrittenLayer
from mlakit.launch_cache.calls import RecordedCalls, is_intercepted
from mlakit.model.geometry import RowShape
from mlakit.model.masks import Mask
from mlakit.ops._refusals import (
    refuse_grad,
    refuse_lazy_signs,
    refuse_memory,
    refuse_tangents,
    refuse_vmap,
    requires_grad,
)
from mlakit.plan import DecodePlanTensors, EvenSplit

Results: TypeAlias = tuple[Tensor, ...]

OPS: dict[str, Op] = {}  # by name
# "mlakit", and another name where the package is loaded under one, beside an installed mlakit
_NAMESPACE = __name__.partition(".")[0]
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")


@dataclass(frozen=True)
class Packing:
    """The conversion of one type of argument to tensors, numbers and strings, and back."""

    schema: tuple[str, ...]  # "Tensor? {}_beside": a type, and a name made from the argument's
    pack: Callable[[Any], Sequence[Any]]
    unpack: Callable[..., Any]


def _as_it_is(kind: str) -> Packing:
    return Packing((kind + " {}",), lambda value: (value,), lambda value: value)


def _pack_layer(layer: CacheLayer | None) -> Sequence[Any]:
    if layer is None:
        return (None, None, 1.0, None, "", 0, 0, 0)
    row, scale = layer.codec.row, layer.tensor_scale
    number, tensor = (1.0, scale) if isinstance(scale, Tensor) else (scale, None)
    widths = (row.kv_lora_rank, row.qk_rope_head_dim, row.v_width)
    return (layer.payload, layer.beside, number, tensor, layer.codec.name, *widths)


def _unpack_layer(
    payload: Tensor | None,
    beside: Tensor | None,
    number: float,
    tensor: Tensor | None,
    format: str,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    v_width: int,
) -> CacheLayer | None:
    if payload is None:
        return None
    codec = row_codec(format, RowShape(kv_lora_rank, qk_rope_head_dim, v_width))
    return CacheLayer(codec, payload, beside, number if tensor is None else tensor)


def _layer_packing(payload: str, beside: str) -> Packing:
    schema = (
        payload + " {0}",
        beside + " {0}_beside",
        "float {}_tensor_scale",
        "Tensor? {}_tensor_scale_on_device",
        "str {}_format",
        "int {}_kv_lora_rank",
        "int {}_qk_rope_head_dim",
        "int {}_v_width",
    )
    return Packing(schema, _pack_layer, _unpack_layer)


def _table_packing(table: str) -> Packing:
    return Packing(
        (table + " {}", "Tensor? {}_slots"),
        lambda table: tuple(table) if isinstance(table, tuple) else (table, None),
        lambda table, slots: table if slots is None else (table, slots),
    )


def _pack_splits(splits: Splits) -> Sequence[Any]:
    if isinstance(splits, EvenSplit):
        return ([splits.num_splits], [])
    return ([], []) if splits is None else (list(splits[4:]), list(splits[:4]))


def _unpack_splits(sizes: list[int], plan: list[Tensor]) -> Splits:
    if plan:
        items, cta_starts, partial_starts, empty_requests = plan
        return DecodePlanTensors(items, cta_starts, partial_starts, empty_requests, *sizes)
    return EvenSplit(*sizes) if sizes else None


PACKINGS: dict[Any, Packing] = {
    Tensor: _as_it_is("Tensor"),
    Tensor | None: _as_it_is("Tensor?"),
    list[Tensor]: _as_it_is("Tensor[]"),
    float: _as_it_is("float"),
    int: _as_it_is("int"),
    bool: _as_it_is("bool"),
    str: _as_it_is("str"),
    torch.dtype: _as_it_is("ScalarType"),
    CacheLayer: _layer_packing("Tensor", "Tensor?"),
    CacheLayer | None: _layer_packing("Tensor?", "Tensor?"),
    # each written tensor is an alias set of its own
    WrittenLayer: _layer_packing("Tensor({0}_p!)", "Tensor({0}_s!)?"),
    PageTable: _table_packing("Tensor"),
    PageTable | None: _table_packing("Tensor?"),
    Mask: Packing(
        ("str {}", "int {}_window"),
        lambda mask: (mask.kind, mask.window),
        Mask,
    ),
    KVShard: Packing(("int[] {}",), lambda shard: (list(shard),), lambda shard: KVShard(*shard)),
    Splits: Packing(("int[] {}_sizes", "Tensor[] {}_plan"), _pack_splits, _unpack_splits),
}

P = ParamSpec("P")
R = TypeVar("R", bound=Results)


def op(name: str, *, fake: Callable[[Any], Results]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a public op of a body; it is called as the body is.

    The body takes a record of `mlakit.kernels.arguments`, then the results, each given or None:
    body(arguments, *results) -> results. It validates, selects, allocates and launches.

    fake  fake(arguments) -> new tensors in the shapes and dtypes of the results
    """

    def registered(body: Callable[P, R]) -> Callable[P, R]:
        OPS[name] = Op(name, body, fake)
        return OPS[name].call  # type: ignore[return-value]  # it takes what the body takes

    return registered


class Op:
    """The body of an op, `mlakit::<name>` that runs it, and `mlakit::<name>_out` that writes
    results."""

    def __init__(
        self, name: str, body: Callable[..., Results], fake: Callable[[Any], Results]
    ) -> None:
        self.name, self.body, self.fake = name, body, fake
        first, *self.results = signature(body).parameters
        hints = get_type_hints(body, include_extras=True)
        self.arguments = hints[first]
        types = get_type_hints(self.arguments, include_extras=True)
        self._calls = RecordedCalls(name, self._run_in_full, self._dispatch)
        self._written = [i for i, type_ in enumerate(types.values()) if type_ == WrittenLayer]
        self._packings = [(field, PACKINGS[type_]) for field, type_ in types.items()]
        inputs = [part.format(field) for field, each in self._packings for part in each.schema]
        outs = [f"Tensor(r{i}!) {result}" for i, result in enumerate(self.results)]
        returned = ", ".join(["Tensor"] * len(self.results))
        self.functional = self._define(name, inputs, f"({returned})", self._call_flat, self._fake)
        self.writing = self.functional
        if self.results:  # an op without results only writes to its arguments
            self.writing = self._define(
                f"{name}_out", [*inputs, *outs], "()", self._call_flat_out, lambda *flat: None
            )

    def _define(
        self,
        name: str,
        schema: list[str],
        returns: str,
        call: Callable[[Sequence[Any]], Any],
        fake: Callable[..., Any],
    ) -> Callable[..., Any]:
        """Register an op.

        call  runs the op with flat arguments; None if a tensor is not plain
        """
        _LIBRARY.define(f"{name}({', '.join(schema)}) -> {returns}")
        overload: Callable[..., Any] = getattr(getattr(torch.ops, _NAMESPACE), name).default

        def run(*flat: Any) -> Any:
            got = call(flat)
            if got is None:
                refuse_memory(self.name, **self._named(*self._unpack_all(flat)))
            return self._bare(got)

        def run_above_autograd(*flat: Any) -> Any:
            if forward_ad._current_level >= 0:
                refuse_tangents(self.name, **self._named(*self._unpack_all(flat)))
            # other dispatch keys, such as those of fake tensors and of dispatch modes, come later
            got = None if is_intercepted() else call(flat)
            if got is not None:
                return self._bare(got)
            with private.below_autograd():
                return overload(*flat)

        def run_batched(*flat: Any) -> NoReturn:
            refuse_vmap(self.name, **self._named(*self._unpack_all(flat)))

        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        _LIBRARY.impl(name, run_above_autograd, "Autograd")
        _LIBRARY.impl(name, run_batched, "FuncTorchBatched")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_LIBRARY)
        return overload

    def call(self, arguments: Any, *results: Tensor | None) -> Results:
        """Run with the caller's results where given; all of them come back."""
        if torch.compiler.is_compiling():
            return self._dispatch(arguments, results)
        if forward_ad._current_level >= 0:
            refuse_tangents(self.name, **self._named(arguments, results))
        got = self._calls.call(arguments, results)
        if self._written:
            self._count_writes(arguments, results)
            return got
        for result in results:
            if result is not None:
                self._count_writes(arguments, results)
                break
        return got

    def _dispatch(self, arguments: Any, results: Sequence[Tensor | None]) -> Results:
        """Call the op through `torch.ops.mlakit`."""
        self._refuse_grad(arguments, results)
        if not torch.compiler.is_compiling():
            self._refuse_lazy_signs(arguments, results)
        flat = self.pack(arguments)
        if all(result is None for result in results):
            return _as_tuple(self.functional(*flat))
        fresh = self.fake(arguments)
        given = tuple(
            new if result is None else result for result, new in zip(results, fresh, strict=True)
        )
        self.writing(*flat, *given)
        return given

    @without_autocast
    def _run_in_full(self, arguments: Any, results: Sequence[Tensor | None]) -> Results:
        self._refuse_grad(arguments, results)
        return self.body(arguments, *results)

    def _count_writes(self, arguments: Any, results: Sequence[Tensor | None]) -> None:
        """Bump the versions of tensors that kernels wrote to, as torch's own ops do: autograd
        then notices where it had saved one of them."""
        written = [result for result in results if result is not None]
        for at in self._written:
            layer = arguments[at]
            written += [each for each in (layer.payload, layer.beside) if each is not None]
        increment_version([each for each in written if not each.is_inference()])

    def _refuse_grad(self, arguments: Any, results: Sequence[Tensor | None]) -> None:
        if torch.is_grad_enabled() and requires_grad([*arguments, *results]):
            refuse_grad(self.name, **self._named(arguments, results))

    def _refuse_lazy_signs(self, arguments: Any, results: Sequence[Tensor | None]) -> None:
        layers = {arguments._fields[at]: arguments[at] for at in self._written}
        given = dict(zip(self.results, results, strict=True))
        refuse_lazy_signs(self.name, **layers, **given)

    def _named(self, arguments: Any, results: Sequence[Tensor | None]) -> dict[str, Any]:
        given = dict(zip(self.results, results, strict=True)) if results else {}
        return {**arguments._asdict(), **given}

    def pack(self, arguments: Any) -> list[Any]:
        """The arguments as `torch.ops.mlakit.<name>` takes them."""
        return [
            flat
            for value, (_, packing) in zip(arguments, self._packings, strict=True)
            for flat in packing.pack(value)
        ]

    def _unpack(self, flat: Sequence[Any]) -> Any:
        values = iter(flat)
        return self.arguments(
            *(
                packing.unpack(*(next(values) for _ in packing.schema))
                for _, packing in self._packings
            )
        )

    def _unpack_all(self, flat: Sequence[Any]) -> tuple[Any, tuple[Tensor, ...]]:
        """The arguments, and the results if the call writes to the caller's."""
        inputs = sum(len(packing.schema) for _, packing in self._packings)
        return self._unpack(flat[:inputs]), tuple(flat[inputs:])

    def _call_flat(self, flat: Sequence[Any]) -> Results | None:
        nothing = (None,) * len(self.results)
        return self._calls.call_plain(self._unpack(flat), nothing)

    def _call_flat_out(self, flat: Sequence[Any]) -> Results | None:
        arguments, results = self._unpack_all(flat)
        if self._calls.call_plain(arguments, results) is None:
            return None
        self._count_writes(arguments, results)
        return ()

    def _fake(self, *flat: Any) -> Any:
        return self._bare(self.fake(self._unpack(flat)))

    def _bare(self, results: Results) -> Any:
        if not results:
            return None
        return results[0] if len(results) == 1 else results


def _as_tuple(results: Any) -> Results:
    if results is None:
        return ()
    return results if isinstance(results, tuple) else (results,)
