"""Builds the folder that Hugging Face's `kernels` loads: python scripts/hub.py FOLDER

`kernels.get_kernel` downloads one variant of a repository on the Hub, such as build/torch-cuda, and
imports it under a name of its own, beside an mlakit that may be installed. The variants are all the
same, since mlakit has nothing to compile: the package of this checkout with relative imports, less
what only the command line, tests and the plugins of engines use. To publish FOLDER:

    hf upload ORGANISATION/mlakit FOLDER --repo-type kernel
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mlakit"
NAME = PACKAGE.name
BACKENDS = ("cpu", "cuda", "rocm")
VERSION = 1  # of the repository on the Hub: get_kernel(..., version=1)
LEFT_OUT = (
    "__main__.py", "compat/modular", "integrations/releases.py", "integrations/seams.py",
    "integrations/sglang", "integrations/steps.py", "integrations/vllm", "integrations/warmup.py",
    "tools",
)  # fmt: skip
# `kernels` looks layers up in the module `layers` of the package
LAYERS = f'''\
"""The attention layers of transformers over latent rows, for its KernelConfig."""

from {NAME}.integrations.transformers.layer_classes import __getattr__ as __getattr__
'''
CARD = """\
---
library_name: kernels
license: apache-2.0
tags:
- kernels
- attention
- mla
- deepseek
---

# mlakit

Multi-head Latent Attention for PyTorch in pure Python, version {version}: Triton and Gluon kernels
for NVIDIA GPUs from sm_80 on, and vectorised torch for any CPU. The functions, with shapes and
dtypes, are those of [mlakit]({home}).

```python
from kernels import get_kernel

mlakit = get_kernel("mlakit/mlakit", version={major})
geometry = mlakit.MLAGeometry.preset("deepseek-v3")
out, lse = mlakit.mla_decode(q, cache, page_table, kv_lens, softmax_scale=geometry.softmax_scale)
```

In a model of transformers 5.17 or newer, the attention of DeepSeek-V3 then runs over one latent row
per token:

```python
from transformers import AutoModelForCausalLM, KernelConfig

kernels = KernelConfig({{"DeepseekV3Attention": "mlakit/mlakit:DeepseekV3Attention"}})
model = AutoModelForCausalLM.from_pretrained(
    "deepseek-ai/DeepSeek-V3", kernel_config=kernels, allow_all_kernels=True
)
```

The layers are {layers}.

There is no backward. The command line, `warmup` and the plugins for engines need the package.
"""


def build(folder: Path) -> list[Path]:
    """Write the card and all variants into an empty or new folder, and return the variants."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"build: {folder} must be empty or new")
    files = {**package_files(), "layers.py": relative(LAYERS, PurePosixPath("layers.py"))}
    digest = hashlib.sha256("\0".join(f"{k}\0{v}" for k, v in files.items()).encode()).hexdigest()
    variants = []
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        metadata = {
            "name": NAME,
            # the name of the module, and of its ops in torch.ops
            "id": f"_{NAME}_{backend}_{digest[:12]}",
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        for name, text in {**files, "metadata.json": json.dumps(metadata, indent=2)}.items():
            path = variant / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        variants.append(variant)
    (folder / "README.md").write_text(card(), encoding="utf-8")
    return variants


def card() -> str:
    """The page of the repository on the Hub."""
    sys.path.insert(0, str(ROOT))
    from mlakit import __version__
    from mlakit.integrations.transformers.layer_classes import CLASSES

    names = ", ".join(f"`{name}`" for name in CLASSES)
    home = re.findall(r'^Homepage = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
    return CARD.format(version=__version__, home=home, major=VERSION, layers=names)


def package_files() -> dict[str, str]:
    """The modules of the package by path, with relative imports."""
    return {
        path.as_posix(): relative((PACKAGE / path).read_text(encoding="utf-8"), path)
        for path in _modules()
    }


def _modules() -> Iterator[PurePosixPath]:
    for file in sorted(PACKAGE.rglob("*.py")):
        path = PurePosixPath(file.relative_to(PACKAGE).as_posix())
        if not any(path.is_relative_to(left) for left in LEFT_OUT):
            yield path


def relative(source: str, path: PurePosixPath) -> str:
    """The source of a module with its imports of the package made relative.

    path  of the module in the package
    """
    dots = "." * len(path.parts)  # of `path`'s own folder; then one for each folder above
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(_is_ours(each.name) for each in node.names):
            raise ValueError(f"{path}:{node.lineno}: write `from {NAME} import`, not `import`")
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_ours(node.module or ""):
            line, before = lines[node.lineno - 1], node.col_offset
            pattern = rf"from {NAME}(?:\.(?=\w)|\b)"
            lines[node.lineno - 1] = line[:before] + re.sub(
                pattern, f"from {dots}", line[before:], count=1
            )
    return "".join(lines)


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == NAME


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="an empty or new folder")
    for variant in build(parser.parse_args().folder):
        print(variant)  # noqa: T201


if __name__ == "__main__":
    main()
