"""DeepSeek's FlashMLA under its own names, argument positions and conventions.

`install()` makes `import flash_mla` find this package, so that a program written for FlashMLA runs
on every device mlakit runs on. Forward only. docs/flash_mla.md compares name by name.

Conventions that differ from the rest of mlakit: the softmax scale defaults to d ** -0.5, nothing is
masked unless `causal` is set, and a query that attends to nothing has an lse of +inf.
"""

from mlakit.compat.flash_mla.decoding import flash_mla_with_kvcache
from mlakit.compat.flash_mla.installation import Installation, install, uninstall
from mlakit.compat.flash_mla.metadata import FlashMLASchedMeta, get_mla_metadata
from mlakit.compat.flash_mla.sparse_prefill import flash_mla_sparse_fwd
from mlakit.compat.flash_mla.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__version__ = "1.0.0"  # of the interface, which callers compare; mlakit has its own

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
