"""Loads libraries from the folder of fetched peers.

flashmla/_flashmla_C.abi3.so      registers torch.ops._flashmla_C
flashmla/flash_mla_interface.py   the wrapper, which loads the library
fa3/_vllm_fa3_C.abi3.so.xz        registers torch.ops._vllm_fa3_C; decompressed at the first use
fa3/flash_attn_interface.py       the wrapper
deep_gemm/                        a package, with the headers that nvcc compiles at the first use
"""

from __future__ import annotations

import importlib.util
import lzma
import os
import shutil
import sys
import tempfile
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch

FLASH_MLA = Path("flashmla/_flashmla_C.abi3.so")
FLASH_MLA_WRAPPER = Path("flashmla/flash_mla_interface.py")
FA3 = Path("fa3/_vllm_fa3_C.abi3.so")
FA3_PACKED = Path("fa3/_vllm_fa3_C.abi3.so.xz")
FA3_WRAPPER = Path("fa3/flash_attn_interface.py")
DEEP_GEMM = Path("deep_gemm/__init__.py")
WHEEL = "vllm==0.26.0"  # the source of the files
MODULE_PREFIX = "mlakit_peers_"


@cache
def load_wrapper(path: Path, peer: str) -> ModuleType:
    """Execute a fetched source file as the module of a peer."""
    spec = _spec(path, peer)
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


@cache
def load_package(init: Path, peer: str) -> ModuleType:
    """Import a fetched package by its `__init__.py`."""
    spec = _spec(init, peer, [str(init.parent)])
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    sys.modules[spec.name] = module  # its own modules import each other through this name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _spec(path: Path, peer: str, submodules: list[str] | None = None) -> ModuleSpec:
    spec = importlib.util.spec_from_file_location(
        f"{MODULE_PREFIX}{peer}", path, submodule_search_locations=submodules
    )
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path} is missing: fetch the peers again")
    return spec


@cache
def load_packed_library(packed: Path, library: Path) -> None:
    """Load `library`. If it is missing or older than `packed`, decompress it first: next to
    `packed`, or to a temporary folder if that is read-only."""
    if _is_older(library, packed):
        try:
            unpack(packed, library)
        except OSError:  # a read-only folder
            with tempfile.TemporaryDirectory(prefix="mlakit-peers-") as scratch:
                unpack(packed, Path(scratch) / library.name)
                # the file may be deleted once it is loaded
                torch.ops.load_library(str(Path(scratch) / library.name))
            return
    torch.ops.load_library(str(library))


def _is_older(library: Path, packed: Path) -> bool:
    """Whether the library is missing, or the packed one is newer."""
    if not library.is_file():
        return True
    return packed.is_file() and packed.stat().st_mtime_ns > library.stat().st_mtime_ns


def unpack(packed: Path, library: Path) -> None:
    """Write the library atomically: no other process sees a partial file."""
    partial = library.with_name(f"{library.name}.{os.getpid()}")
    try:
        with lzma.open(packed) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        partial.replace(library)
    except (lzma.LZMAError, EOFError) as error:
        raise RuntimeError(f"{packed} is damaged: fetch the peers again") from error
    finally:
        partial.unlink(missing_ok=True)
