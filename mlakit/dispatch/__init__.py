"""The choice of the kernel that serves a call, with the settings and the checks of a call."""

from importlib import import_module

__all__ = ["explain", "explain_kernels", "select"]


def __getattr__(name: str) -> object:
    """Import `selection` late: it reads what the kernels support, and they import this package."""
    if name in __all__:
        return getattr(import_module(".selection", __name__), name)
    raise AttributeError(f"module 'mlakit.dispatch' has no attribute {name!r}")
