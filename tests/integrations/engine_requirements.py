"""What an engine's wheel needs on a machine without CUDA: prints requirements for pip.

    python tests/integrations/engine_requirements.py vllm

The released wheels of vLLM and SGLang are those for CUDA. Their Python code runs elsewhere too,
without the packages that only bring GPU code; torch is installed before, and transformers is the
release that the tests compare with.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys

GPU_ONLY = {
    "apache-tvm-ffi",
    "cuda-python",
    "fastsafetensors",
    "flash-attn-4",
    "flashinfer-python",
    "humming-kernels",
    "instanttensor",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "nvidia-mathdx",
    "nvshmem4py-cu13",
    "nvtx",
    "pynvvideocodec",
    "quack-kernels",
    "sgl-deep-ep",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "sglang-kernel",
    "tilelang",
    "tokenspeed-mla",
    "torch",
    "torch-memory-saver",
    "torchaudio",
    "torchcodec",
    "torchvision",
}
TRANSFORMERS = "transformers==5.17.0"


def kept(requirement: str) -> str | None:
    """A requirement of an engine, ours in its place, or None."""
    if "extra ==" in requirement:
        return None
    match = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert match is not None, requirement
    name = match[0].lower().replace("_", "-")
    if name in GPU_ONLY:
        return None
    return TRANSFORMERS if name == "transformers" else requirement


if __name__ == "__main__":
    wanted = (kept(each) for each in importlib.metadata.requires(sys.argv[1]) or [])
    print("\n".join(each for each in wanted if each))  # noqa: T201
