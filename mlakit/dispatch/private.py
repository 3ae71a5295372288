"""Private interfaces of torch and of Triton: what a new version of them may break is here.

torch's are looked up when this module is imported, and one that is missing is an error that names
it; those that only make calls cheaper are None instead. Triton's belong to versions:
`prepare_launch` knows the launch functions of 3.6 and 3.9, and calls a kernel's own launcher in any
other version. A test calls each of them, and its name says which one a new version broke.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, reduce, wraps
from operator import or_
from typing import Any

import torch
from torch import Tensor

_PACKAGE = __name__.partition(".")[0] + "."  # of the modules of mlakit


def _of_torch(path: str, *, is_needed: bool = True) -> Any:
    """Look up `torch.<path>`."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is None and is_needed:
        raise ImportError(f"mlakit needs torch.{path}, which torch {torch.__version__} lacks")
    return found


# state of the dispatcher
dispatch_modes: Callable[[], int] = _of_torch("_C._len_torch_dispatch_stack")  # how many are active
is_transformed: Callable[[], bool] = _of_torch("_C._are_functorch_transforms_active")
is_batched: Callable[[Tensor], bool] = _of_torch("_C._functorch.is_batchedtensor")
is_forward_mode: Callable[[], bool] = _of_torch("_C._is_fwd_grad_enabled")
_dispatch_mode: Callable[[Any], object] = _of_torch("_C._get_dispatch_mode")
_ModeKey = _of_torch("_C._TorchDispatchModeKey")
below_autograd: Callable[[], Any] = _of_torch("_C._AutoDispatchBelowAutograd")
dispatch_keys: Callable[[Tensor], Any] = _of_torch("_C._dispatch_keys")
_Key = _of_torch("_C.DispatchKey")
_KeySet = _of_torch("_C.DispatchKeySet")
# CUDA functions, which builds without CUDA lack
current_device: Callable[[], int] = _of_torch("_C._cuda_getDevice", is_needed=False)
current_stream: Callable[[int], int] = _of_torch("_C._cuda_getCurrentRawStream", is_needed=False)
is_deterministic: Callable[[], bool] = _of_torch("_C._get_deterministic_algorithms")
# state of torch.compile
_TensorGuards = _of_torch("_C._dynamo.guards.TensorGuards", is_needed=False)


def is_traced() -> bool:
    """Return whether operations give tensors without values, as under FakeTensorMode."""
    if not dispatch_modes():
        return False
    modes = map(_dispatch_mode, (_ModeKey.FAKE, _ModeKey.PROXY, _ModeKey.FUNCTIONAL))
    return any(mode is not None for mode in modes)


@lru_cache(maxsize=16)
def plain_keys(device_type: str) -> frozenset[int]:
    """Return the dispatch keys of a tensor of `torch.empty`, out of inference mode and in it."""
    name = device_type.upper()
    if name not in ("CPU", "CUDA"):  # meta tensors have no memory; others have no kernels here
        return frozenset()
    inference = _key_set(getattr(_Key, name), getattr(_Key, f"Autocast{name}"))
    usual = inference | _key_set(_Key.ADInplaceOrView, getattr(_Key, f"Autograd{name}"))
    return frozenset((inference.raw_repr(), usual.raw_repr()))


def _key_set(*keys: Any) -> Any:
    return reduce(or_, map(_KeySet, keys))


def comparison_with(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return a function that compares as many other tensors with these, or None if unavailable.

    It compares types, dtypes, devices, shapes, strides, dispatch keys and need of gradients, as
    torch.compile guards compiled code.
    """
    try:
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        is_alike = guards.check(*tensors)
    except (AttributeError, TypeError, SystemError):
        return None
    return guards.check if is_alike else None


def quick_allocator(device_type: str) -> Callable[..., Tensor] | None:
    """Return what makes a tensor of a shape, strides and a dtype on the current device, or None.

    Code compiled by torch allocates so, past its dispatcher, in half the time; but that memory is
    not filled where `torch.utils.deterministic` asks for it.
    """
    found: Callable[..., Tensor] | None = _of_torch(
        f"_C._dynamo.guards._empty_strided_{device_type}", is_needed=False
    )
    return found


MAX_DESCRIPTORS = 4096  # of 128 bytes: one per layer of a cache, and one per address of the queries


@dataclass(frozen=True)
class Pointer:
    """An argument that is an address; `encode[address]` is what the launch function takes for it,
    None where it takes the address itself."""

    tensor: Tensor
    encode: Mapping[int, Any] | None = None


@dataclass(frozen=True)
class PreparedLaunch:
    """`function(*before_stream, stream, *after_stream, *arguments)` makes the launch again.

    Every `Pointer` among the arguments, also in tuples, is replaced by an address first, aligned
    like the recorded one. With `arguments_are_one` the function takes them as one tuple.
    """

    function: Callable[..., None]
    before_stream: tuple[Any, ...]
    after_stream: tuple[Any, ...]
    arguments: tuple[Any, ...]
    arguments_are_one: bool = False


def with_pointers(value: Any, encoder: Callable[[Any], Mapping[int, Any]]) -> Any:
    """`value` with a `Pointer` for every address; `encoder` makes the mapping of a descriptor."""
    if isinstance(value, Tensor):
        return Pointer(value)
    if isinstance(value, tuple):
        return tuple(with_pointers(part, encoder) for part in value)
    return Pointer(value.base, encoder(value)) if is_descriptor(value) else value


def is_descriptor(value: Any) -> bool:
    """Is it a TMA descriptor?"""
    return hasattr(value, "block_shape")


class MovedDescriptor:
    """A descriptor's shape, strides and options at any address."""

    __slots__ = ("address", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, descriptor: Any, address: int) -> None:
        self.shape, self.strides = descriptor.shape, descriptor.strides
        self.padding = descriptor.padding
        self.round_f32_to_tf32 = getattr(descriptor, "round_f32_to_tf32", False)
        self.address = address

    @property
    def base(self) -> MovedDescriptor:
        """Itself: launchers ask a descriptor's tensor for its address only."""
        return self

    def data_ptr(self) -> int:
        return self.address


class Descriptors(dict[int, Any]):
    """Maps addresses to moved descriptors, or to what `encode` makes of them."""

    def __init__(self, descriptor: Any, encode: Callable[[MovedDescriptor], Any] | None = None):
        super().__init__()
        # not the descriptor itself: it would keep its tensor alive
        self._like = MovedDescriptor(descriptor, 0)
        self._encode = encode

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAX_DESCRIPTORS:
            self.clear()
        moved = MovedDescriptor(self._like, address)
        self[address] = made = moved if self._encode is None else self._encode(moved)
        return made


@dataclass(frozen=True)
class CacheEntry:
    """The place of a compiled kernel in Triton's cache on disk."""

    kernel: str
    key: str  # of everything that the machine code depends on
    exists: bool


class _FoundEntryError(Exception):
    """Ends a compilation that was started to learn its entry in the cache."""


def cache_entry(launch: Callable[[], Any]) -> CacheEntry:
    """Return the entry in Triton's cache of the kernel that `launch` compiles or loads; do neither.

    Triton itself computes the key and looks for it, through a cache manager that stops there.
    """
    import triton
    from triton.runtime.cache import CacheManager, FileCacheManager

    own = triton.knobs.cache.manager_class or FileCacheManager
    found: list[CacheEntry] = []

    class Finder(CacheManager):  # type: ignore[misc]  # Triton has no types
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            self.key = key

        def get_group(self, filename: str) -> Any:
            exists = bool(own(self.key).get_group(filename))
            found.append(CacheEntry(filename.removesuffix(".json"), self.key, exists))
            raise _FoundEntryError

        def get_file(self, filename: str) -> str | None:
            return None

        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            raise AssertionError

        def put_group(self, filename: str, group: dict[str, str]) -> None:
            raise AssertionError

    with triton.knobs.cache.scope():
        triton.knobs.cache.manager_class = Finder
        try:
            launch()
        except _FoundEntryError:
            (entry,) = found
            return entry
    raise RuntimeError("the kernel was compiled earlier in this process")


def cache_folder() -> str:
    """Return the folder of Triton's cache on disk."""
    import triton

    folder: str = triton.knobs.cache.dir
    return folder


@dataclass
class KernelCounts:
    """How often kernels of mlakit were compiled in this process, or loaded from Triton's cache on
    disk. Threads may lose a count."""

    compiled: Counter[str] = field(default_factory=Counter)  # by the kernel's name
    loaded: Counter[str] = field(default_factory=Counter)


KERNEL_COUNTS = KernelCounts()


def count_compilations() -> None:
    """Have Triton report the kernels that it compiles or loads; the listener before still hears."""
    import triton

    knobs = triton.knobs.compilation
    before = knobs.listener

    def listen(*, src: Any, cache_hit: bool, **others: Any) -> None:
        if before is not None:
            before(src=src, cache_hit=cache_hit, **others)
        function = getattr(src, "fn", None)  # a file of IR has none
        if str(getattr(function, "__module__", "")).startswith(_PACKAGE):
            counts = KERNEL_COUNTS.loaded if cache_hit else KERNEL_COUNTS.compiled
            counts[src.name] += 1
            if not cache_hit:
                times = others.get("times")
                took = "" if times is None else f" in {times.total / 1e6:.1f} s"
                logging.getLogger("mlakit").info("compiled %s%s", src.name, took)

    knobs.listener = listen


@contextmanager
def driver_replaced_by(driver: Any) -> Iterator[None]:
    """Have Triton ask `driver` in place of a GPU's in this scope."""
    import triton

    # not `.active`: that property looks for a driver, and there may be none
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    try:
        yield
    finally:
        triton.runtime.driver.set_active(before)


def hash_callees_first() -> None:
    """Have Triton hash the device functions of a kernel before the kernel.

    Triton 3.6 takes over what a callee is known to use before it hashes the callee. The key of a
    kernel in its cache would depend on the kernels that were launched before. Later versions hash
    callees first.
    """
    from triton.runtime.jit import DependenciesFinder

    own = getattr(DependenciesFinder, "_update_hash", None)
    if own is None:
        return

    def update(self: Any, function: Any) -> None:
        if str(getattr(function, "__module__", "")).startswith(_PACKAGE):
            function.cache_key  # noqa: B018  # computed once, and kept by Triton
        own(self, function)

    DependenciesFinder._update_hash = update


def describe_constants_in_tuples() -> None:
    """Have Triton describe kernels whose constants are records to those who listen.

    vLLM listens once it serves. Triton writes the description as JSON, and fails where a type or a
    layout lies in a tuple.
    """
    from triton.runtime import jit

    own = getattr(jit, "serialize_specialization_data", None)
    if own is None:
        return

    @wraps(own)
    def serialize(name: str, signature: Any, constants: dict[Any, Any], *others: Any) -> Any:
        plain = {
            key: _plain(value) if isinstance(value, tuple) else value
            for key, value in constants.items()
        }
        return own(name, signature, plain, *others)

    jit.serialize_specialization_data = serialize


def _plain(value: Any) -> Any:
    """Return a value that JSON knows."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def launch_hooks() -> Callable[[], bool]:
    """Return what says whether a profiler wants Triton to call it at each launch."""
    import triton

    runtime = triton.knobs.runtime
    return lambda: bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def prepare_launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]
) -> PreparedLaunch:
    """Prepare a compiled kernel's launch to be made again, past Triton's look at its arguments.

    Triton's own launcher, which any version has, encodes every TMA descriptor at every launch:
    kernel.run(x, y, z, stream, function, metadata, launch_metadata, hooks …, *arguments).
    """
    prepared = None if torch.version.hip else _prepare_compiled(kernel, grid, arguments)
    if prepared is not None:
        return prepared
    marked = tuple(with_pointers(value, Descriptors) for value in arguments)
    return PreparedLaunch(
        kernel.run, grid, (kernel.function, kernel.packed_metadata, None, None, None), marked
    )


def _prepare_compiled(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]
) -> PreparedLaunch | None:
    """Prepare a call of the launch function in C. None if this version's is not known, and for a
    kernel that needs scratch, is instrumented, or has a launcher of another form."""
    version, run = triton_version(), kernel.run
    if version not in ("3.6", "3.9"):
        return None
    found = _unwrapped(run.launch)
    if found is None or run.global_scratch_size or run.profile_scratch_size:
        return None
    function, encodings = found
    expanded = _encoded(arguments, encodings)
    start = kernel.function, run.launch_cooperative_grid, run.launch_pdl
    scratch = None, None  # global and of a profile
    hooks = None, None, None  # launch metadata, enter and exit hooks
    if version == "3.6":  # a launch function for each kernel
        rest = (*start, *scratch, kernel.packed_metadata, *hooks)
        return PreparedLaunch(function, grid, rest, expanded)
    if run.gsan_enabled:
        return None
    # one launch function for all kernels, which takes a description of the arguments' types
    types = run.arg_annotations, run.kernel_signature
    after_stream = (*start, kernel.packed_metadata, *hooks, *scratch, *types)
    return PreparedLaunch(function, grid, after_stream, expanded, arguments_are_one=True)


def triton_version() -> str:
    """Return Triton's version as 3.6."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def _unwrapped(launch: Any) -> tuple[Callable[..., None], Sequence[Any]] | None:
    """Return the function in C that a wrapper in Python calls, and how each descriptor is encoded.

    None for a wrapper of another form, which a kernel has whose descriptors the hardware does not
    read.
    """
    if inspect.isbuiltin(launch):
        return launch, ()
    wrapped = inspect.getclosurevars(launch).nonlocals
    function, encodings = wrapped.get("launcher"), wrapped.get("tensordesc_meta") or [None]
    if not inspect.isbuiltin(function) or None in encodings:
        return None
    return function, encodings


def _encoded(arguments: Sequence[Any], encodings: Sequence[Any]) -> tuple[Any, ...]:
    """Mark the pointers among arguments; a descriptor becomes its encoding, shape and strides."""
    remaining = iter(encodings)

    def descriptors(value: Any) -> Descriptors:
        encoding = next(remaining)
        return Descriptors(value, lambda moved: _encode(moved, encoding))

    expanded: list[Any] = []
    for value in arguments:
        expanded.append(with_pointers(value, descriptors))
        if is_descriptor(value):
            expanded += (*value.shape, *value.strides)
    return tuple(expanded)


def _encode(moved: MovedDescriptor, encoding: Any) -> Any:
    """Encode a descriptor for the hardware, once per address."""
    # only one vendor has these functions, where kernels with descriptors run
    from triton.backends.nvidia.driver import make_tensordesc_arg

    more = () if triton_version() == "3.6" else (None,)
    return make_tensordesc_arg(moved, encoding, *more)[0]
