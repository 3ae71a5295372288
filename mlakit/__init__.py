"""Multi-head Latent Attention (MLA) for PyTorch, for inference.

The ops take tensors and a paged latent cache; the branches compose them into the attention of a
layer. `mlakit.compat` has the functions of FlashMLA and of Modular's MAX under their own names.

The public names are those of `mlakit._public`, imported on first use: torch is slow to import,
and `mlakit --version` and shell completion do not need it. `import mlakit.ops` registers
`torch.ops.mlakit.*`; `import mlakit` does so too if torch is already imported.
"""

import sys
import warnings
from typing import TYPE_CHECKING

from mlakit._version import __version__ as __version__

# torch warns on import if numpy is missing; mlakit does not need numpy
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

if TYPE_CHECKING:
    from mlakit._public import *  # noqa: F403  # for type checkers
else:
    from importlib import import_module
    from importlib.util import find_spec

    def __getattr__(name: str) -> object:
        """A submodule, a public name (cached in this module) or `__all__`."""
        if name == "__all__":
            return [*import_module("._public", __name__).__all__, "__version__"]
        if name.isidentifier() and not name.startswith("_"):
            submodule = f"{__name__}.{name}"
            if find_spec(submodule) is not None:
                return import_module(submodule)
            public = import_module("._public", __name__)
            if name in public.__all__:
                return globals().setdefault(name, getattr(public, name))
        raise AttributeError(f"module 'mlakit' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})

    if "torch" in sys.modules:
        import_module("._public", __name__)
