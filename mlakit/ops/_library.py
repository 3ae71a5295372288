"""Registration with torch.library, and how objects travel through an op that takes tensors only.

Each public function has one body that validates, selects, allocates and launches. Called eagerly
with plain tensors it runs that body, or replays its launches (`mlakit.replay`): going through the
dispatcher would cost a decode call microseconds and give nothing. Under torch.compile, under a
dispatch mode (fake tensors, make_fx) and with tensors that are not plain (wrapper subclasses, such
as the result of a functional collective) it calls `torch.ops.mlakit.<name>`, whose implementation
unpacks its tensors, numbers and strings and runs the same body: every call is checked alike.

The arguments of a body are the fields of a frozen dataclass. Their types say how they are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, get_type_hints

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mlakit.autocast import without_autocast
from mlakit.cache import CacheLayer, KVShard, PageTable
from mlakit.checks import UnsupportedError
from mlakit.formats import row_codec
from mlakit.geometry import RowShape
from mlakit.masks import Mask
from mlakit.plan import DecodePlanTensors, EvenSplit
from mlakit.replay.calls import RecordedCalls

Splits: TypeAlias = DecodePlanTensors | EvenSplit | None
Results: TypeAlias = tuple[Tensor, ...]

_LIBRARY = torch.library.Library("mlakit", "DEF")


@dataclass(frozen=True)
class Packing:
    """How one type of argument becomes tensors, numbers and strings, and back."""

    schema: tuple[str, ...]  # "Tensor? {}_scales": a type, and a name made from the argument's
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
    return (layer.payload, layer.scales, number, tensor, layer.codec.name, *widths)


def _unpack_layer(
    payload: Tensor | None,
    scales: Tensor | None,
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
    return CacheLayer(codec, payload, scales, number if tensor is None else tensor)


def _layer_packing(payload: str, scales: str) -> Packing:
    schema = (
        payload + " {}",
        scales + " {}_scales",
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
WRITTEN_LAYER = _layer_packing("Tensor(p!)", "Tensor(s!)?")


class Op:
    """A public op: its eager body, `mlakit::<name>`, and `mlakit::<name>_out` that writes results.

    arguments  frozen dataclass, the first parameter of `body`; a field with metadata
               {"written": True} is a cache layer that the op writes to
    body       body(arguments, *results) -> results, each given or None
    fake       fake(arguments) -> new tensors in the shapes and dtypes of the results
    results    their names; with several, `body` and `fake` give a tuple of them
    """

    def __init__(
        self,
        name: str,
        arguments: type[Any],
        body: Callable[..., Results],
        fake: Callable[[Any], Results],
        results: Sequence[str],
    ) -> None:
        self.name, self.arguments, self.results = name, arguments, results
        self.body, self.fake = body, fake
        hints = get_type_hints(arguments)
        self._calls = RecordedCalls(name, hints, self._run_in_full, self._dispatch)
        self._written = [f.name for f in fields(arguments) if f.metadata.get("written")]
        self._packings = [
            (
                field.name,
                WRITTEN_LAYER if field.metadata.get("written") else PACKINGS[hints[field.name]],
            )
            for field in fields(arguments)
        ]
        inputs = [part.format(name) for name, each in self._packings for part in each.schema]
        outs = [f"Tensor(r{i}!) {result}" for i, result in enumerate(results)]
        returned = ", ".join(["Tensor"] * len(results))
        self.functional = self._define(name, inputs, f"({returned})", self._run, self._fake)
        self.writing = self._define(
            f"{name}_out", [*inputs, *outs], "()", self._run_out, lambda *flat: None
        )

    def _define(
        self,
        name: str,
        schema: list[str],
        returns: str,
        implementation: Callable[..., Any],
        fake: Callable[..., Any],
    ) -> Callable[..., Any]:
        _LIBRARY.define(f"{name}({', '.join(schema)}) -> {returns}")
        _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mlakit::{name}", fake, lib=_LIBRARY)
        overload: Callable[..., Any] = getattr(torch.ops.mlakit, name).default
        return overload

    def call(self, results: tuple[Tensor | None, ...], arguments: Mapping[str, Any]) -> Results:
        """Run with the caller's `results` where given; all of them come back."""
        if torch.compiler.is_compiling():
            return self._dispatch(arguments, results)
        got = self._calls.call(arguments, results)
        for result in results:
            if result is not None or self._written:
                self._count_writes(arguments, results)
                break
        return got

    def _dispatch(self, arguments: Mapping[str, Any], results: Sequence[Tensor | None]) -> Results:
        """Through `torch.ops.mlakit`."""
        self._refuse_grad(arguments, results)
        flat = self.pack(**arguments)
        if all(result is None for result in results):
            return _as_tuple(self.functional(*flat))
        fresh = self.fake(self.arguments(**arguments))
        given = tuple(
            new if result is None else result for result, new in zip(results, fresh, strict=True)
        )
        self.writing(*flat, *given)
        return given

    @without_autocast
    def _run_in_full(
        self, arguments: Mapping[str, Any], results: Sequence[Tensor | None]
    ) -> Results:
        self._refuse_grad(arguments, results)
        return self.body(self.arguments(**arguments), *results)

    def _count_writes(self, arguments: Mapping[str, Any], results: Sequence[Tensor | None]) -> None:
        """Bump the versions of tensors that kernels wrote to, as torch's own ops do: autograd
        then notices where it had saved one of them."""
        written = [result for result in results if result is not None]
        for name in self._written:
            layer = arguments[name]
            written += [each for each in (layer.payload, layer.scales) if each is not None]
        increment_version([each for each in written if not each.is_inference()])

    def _refuse_grad(self, arguments: Mapping[str, Any], results: Sequence[Tensor | None]) -> None:
        if torch.is_grad_enabled() and _requires_grad([*arguments.values(), *results]):
            refuse_grad(self.name, **arguments, **dict(zip(self.results, results, strict=True)))

    def pack(self, **arguments: Any) -> list[Any]:
        """The arguments as `torch.ops.mlakit.<name>` takes them."""
        return [
            value for name, packing in self._packings for value in packing.pack(arguments[name])
        ]

    def _unpack(self, flat: Sequence[Any]) -> Any:
        values = iter(flat)
        return self.arguments(
            **{
                name: packing.unpack(*(next(values) for _ in packing.schema))
                for name, packing in self._packings
            }
        )

    def _run(self, *flat: Any) -> Any:
        nothing = (None,) * len(self.results)
        return self._bare(self._calls.call_plain(vars(self._unpack(flat)), nothing))

    def _run_out(self, *flat: Any) -> None:
        inputs, results = flat[: -len(self.results)], flat[-len(self.results) :]
        arguments = vars(self._unpack(inputs))
        self._calls.call_plain(arguments, results)
        self._count_writes(arguments, results)

    def _fake(self, *flat: Any) -> Any:
        return self._bare(self.fake(self._unpack(flat)))

    def _bare(self, results: Results) -> Any:
        return results[0] if len(self.results) == 1 else results


def _as_tuple(results: Any) -> Results:
    return results if isinstance(results, tuple) else (results,)


def refuse_grad(op: str, **arguments: Any) -> None:
    """There is no backward: a graph that would end here silently is refused."""
    if not torch.is_grad_enabled():
        return
    for argument, value in arguments.items():
        for name, part in _parts(argument, value):
            if _requires_grad(part):
                raise UnsupportedError(
                    f"{op}: {name} must not require grad, for there is no backward; "
                    "call it under torch.no_grad() or torch.inference_mode()"
                )


def _requires_grad(value: Any) -> bool:
    """Of a tensor, a cache layer or a list; the answer is nearly always no, and must be quick."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, CacheLayer):
        return any(map(_requires_grad, (value.payload, value.scales, value.tensor_scale)))
    return isinstance(value, list) and any(map(_requires_grad, value))


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    """What an argument consists of, by name."""
    if isinstance(value, list):
        return [(f"{name}[{i}]", each) for i, each in enumerate(value)]
    if isinstance(value, CacheLayer):
        parts = ("payload", "scales", "tensor_scale")
        return [(f"the {part} of {name}", getattr(value, part)) for part in parts]
    return [(name, value)]
