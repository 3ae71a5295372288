"""Multi-head Latent Attention (MLA) for PyTorch, for inference."""

from mlakit._version import __version__

__all__ = ["__version__"]
