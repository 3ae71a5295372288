"""The description of a call, and of the calls that a kernel takes.

A `Problem` is a plain description of one call: names and numbers, no tensors. A `KernelSpec` holds
a predicate over problems that returns the reason of a refusal, or None, and the traits of masks
that the kernel knows; a mask with another trait is refused. Adding a kernel is adding a spec;
nothing else decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch

from mlakit.dispatch.architectures import amd_arch, arch_name
from mlakit.dispatch.names import Backend
from mlakit.model.geometry import RowShape
from mlakit.model.masks import KINDS


class Use(Enum):
    """A property of a call that few kernels take; the others refuse it as "takes no <value>"."""

    Q_SCALE = "q_scale"  # q_scale= is given
    FIXED_SPLITS = "fixed splits of several queries"  # deterministic=True or EvenSplit, q_starts=
    FLAT_PAGE_TABLE = "flat page table"  # page_table=(kv_starts, slots)
    KV_SHARD = "kv_shard"  # kv_shard= of more than one rank
    BF16_Q_ROPE = "bf16 q_rope of e4m3 q"
    Q_ROPE = "q_rope"  # q_rope= of sparse_mla, of q's dtype
    OTHER_Q_ROPE = "q_rope of another dtype"  # any other q_rope= that is not of q's dtype
    # by strides or addresses that are no multiple of 16 bytes
    UNALIGNED_CACHE = "unaligned rows of the cache"
    UNALIGNED_QUERY = "unaligned rows of q"  # or of q_rope
    UNALIGNED_SCALES = "unaligned scales of the cache"  # of a page
    UNALIGNED_KEYS = "unaligned rows of k_nope or k_rope"
    UNALIGNED_VALUES = "unaligned rows of v"
    CONTIGUOUS_KEYS = "v with contiguous keys instead of columns"  # of e4m3
    SCALES_OF_KEYS = "scales of each key"  # k_scale= or v_scale= with keys_per_scale=1 that varies
    UNALIGNED_OPERANDS = "unaligned rows of a or b"
    UNEVEN_PAGES = "pages at distances that are no multiple of a row's"  # of sparse_mla's caches
    OTHER_EXTRA_FORMAT = "extra cache of another format"  # extra= of sparse_mla
    OTHER_ROPE_STEPS = "rope columns at other steps"  # in a tensor of their own, between pages
    SPLIT_EXTRA = "split extra cache"  # extra= of sparse_mla, with rows in two tensors
    ALIBI_SLOPES = "alibi_slopes"  # alibi_slopes= is given

    def __str__(self) -> str:
        return self.value

    @property
    def refusal(self) -> str:
        """The reason that a kernel gives which does not take it."""
        why = ": no TMA descriptor can address them" if self.value.startswith("unaligned") else ""
        return f"takes no {self.value}{why}"


class ProductShape(NamedTuple):
    """The sizes of a block-scaled product."""

    batch: int  # 1 without a batch axis
    rows: int  # of a
    columns: int  # of the result
    depth: int
    n_group: int  # rows of b that share a scale
    k_group: int  # columns of a and b that share a scale

    def __str__(self) -> str:
        groups = f"groups of {self.n_group} x {self.k_group}"
        return f"{self.batch} x {self.rows} x {self.columns} x {self.depth} in {groups}"


@dataclass(frozen=True)
class Problem:
    """One call of an op. Fields an op has no use for keep their defaults."""

    device: str  # "cpu", "cuda"
    arch: int = 0  # 90 for sm_90, 0x942 for gfx942 (`architectures`); 0 off CUDA and ROCm
    dtype: str = ""  # of the queries or activations, as torch prints it
    format: str = ""  # of the cache rows
    heads: int = 0
    page_size: int = 0
    row: RowShape | None = None
    head_widths: tuple[int, int, int] | None = None  # (D_N, D_R, D_V) of the expanded form
    mask: str = ""
    uses: tuple[Use, ...] = ()
    # how much work there is, which decides between kernels that can all do it
    num_tokens: int = 0
    max_keys: int = 0  # of a request, as its page table has room for
    num_sms: int = 0  # 0: not known
    is_batch_invariant: bool = False  # a request's result may not depend on the rest of the batch
    product: ProductShape | None = None  # of scaled_mm_fp8
    has_extra: bool = False  # sparse_mla: there is a second cache

    def __str__(self) -> str:
        where = self.device + (f" {arch_name(self.arch)}" if self.arch else "")
        facts = {
            "dtype": self.dtype,
            "format": self.format,
            "heads": self.heads,
            "page_size": self.page_size,
            "row": f"{self.row.width}/{self.row.v_width}" if self.row else "",
            "widths": "+".join(map(str, self.head_widths or ())),
            "mask": self.mask,
            "uses": " and ".join(map(str, self.uses)),
            "num_tokens": self.num_tokens,
            "max_keys": self.max_keys,
            "num_sms": self.num_sms,
            "product": self.product,
            "has_extra": self.has_extra,
        }
        return ", ".join([where, *(f"{name}={fact}" for name, fact in facts.items() if fact)])


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: which op it serves on which backend, where its launcher is, what it refuses.

    Where a backend has several kernels of an op, each has a name, which its launcher and its
    planner take as their first argument.
    """

    backend: Backend
    op: str
    launcher: str  # "module:function", imported at the first call
    predicate: Callable[[Problem], str | None]  # why it does not take a problem; None if it does
    planner: str = ""  # "module:function" that makes its plans, where they can be made ahead
    kernel: str = ""  # its name among the backend's kernels of this op; "" for the only one
    # when it could take a problem, but another kernel of the backend is faster
    why_slower: Callable[[Problem], str | None] | None = None
    mask_traits: tuple[str, ...] = ()  # of `MaskTraits`; a mask with any other one is refused
    # which configuration a problem needs: `auto` takes the kernel only where a check of it has
    # passed on this machine (`dispatch.proofs`). None, and "" for a problem: it needs no check
    variant: Callable[[Problem], str] | None = None

    def __str__(self) -> str:
        return f"{self.name}-{self.op}"

    @property
    def name(self) -> str:
        """The name by which `backend=` asks for this kernel."""
        return f"{self.backend}:{self.kernel}" if self.kernel else self.backend

    @property
    def masks(self) -> tuple[str, ...]:
        """The kinds of masks that the kernel takes."""
        return tuple(
            kind
            for kind, traits in KINDS.items()
            if all(name in self.mask_traits for name, is_set in traits._asdict().items() if is_set)
        )

    def why_not(self, problem: Problem) -> str | None:
        """Return the reason why the kernel does not take a problem; None if it does."""
        refusal = self.predicate(problem)
        if refusal is None and problem.mask and problem.mask not in self.masks:
            refusal = f"needs a mask of {' or '.join(self.masks)}, got {problem.mask}"
        return refusal

    @cached_property
    def launch(self) -> Callable[..., Any]:
        """The launcher itself."""
        return self._named(_imported(self.launcher))

    @cached_property
    def plan(self) -> Callable[..., Any]:
        """The planner itself."""
        return self._named(_imported(self.planner))

    def _named(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return partial(function, self.kernel) if self.kernel else function


def _imported(path: str) -> Callable[..., Any]:
    module, name = path.split(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


# (arch, number of SMs)
_PRETENDED: ContextVar[tuple[int, int] | None] = ContextVar("mlakit_pretended", default=None)


@contextmanager
def pretending(arch: int, num_sms: int = 0) -> Iterator[None]:
    """Have problems in this scope described as if their tensors were on a GPU of `arch`."""
    token = _PRETENDED.set((arch, num_sms))
    try:
        yield
    finally:
        _PRETENDED.reset(token)


def device_facts(device: torch.device) -> tuple[str, int]:
    """Return (device type, arch) of a torch device, as `Problem` wants them."""
    pretended = _PRETENDED.get()
    if pretended is not None:
        return "cuda", pretended[0]
    if device.type != "cuda":
        return device.type, 0
    return "cuda", arch_of(device)


def arch_of(device: torch.device) -> int:
    """The architecture of a GPU; a ROCm build of torch names AMD's as CUDA devices."""
    if torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    name: str = torch.cuda.get_device_properties(device).gcnArchName
    arch = amd_arch(name)
    if arch is None:
        raise RuntimeError(f"the GPU's architecture must be named as gfx942, got {name!r}")
    return arch


def num_sms(device: torch.device) -> int:
    """Return the SMs of a torch device, as `Problem` wants them; 0 off CUDA."""
    pretended = _PRETENDED.get()
    if pretended is not None:
        return pretended[1]
    return _num_sms(device.index) if device.type == "cuda" else 0


@lru_cache(maxsize=64)
def _num_sms(index: int | None) -> int:
    facts = torch.cuda.get_device_properties("cuda" if index is None else index)
    count: int = facts.multi_processor_count
    return count
