"""A drop-in for DeepSeek's FlashMLA: its names, argument positions and conventions, forward only.

After `install()`, `import flash_mla` finds this package: a program written for FlashMLA then runs
on every device that mlakit supports. docs/flash_mla.md compares the functions one by one.

Conventions that differ from the rest of mlakit: the softmax scale defaults to d ** -0.5,
`causal` defaults to False, and the lse of a query that attends to no key is +inf.
"""

from mlakit.compat.flash_mla.decoding import flash_mla_with_kvcache
from mlakit.compat.flash_mla.installation import install, uninstall
from mlakit.compat.flash_mla.metadata import FlashMLASchedMeta, get_mla_metadata
from mlakit.compat.flash_mla.sparse_prefill import flash_mla_sparse_fwd
from mlakit.compat.flash_mla.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from mlakit.compat.installation import Installation

__version__ = "1.0.0"  # FlashMLA's version, which callers check; not mlakit's

__all__ = [
    "FlashMLASchedMeta",
    "Installation",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "install",
    "uninstall",
]
