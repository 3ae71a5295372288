"""What vLLM's wheel needs on a machine without CUDA: prints requirements for pip.

The released wheel is the one for CUDA. Its Python code runs elsewhere too, without the packages
that only bring GPU code; torch is installed before, and transformers is the release that the tests
compare with.
"""

from __future__ import annotations

import importlib.metadata
import re

GPU_ONLY = {
    "apache-tvm-ffi",
    "fastsafetensors",
    "flashinfer-python",
    "humming-kernels",
    "instanttensor",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "nvtx",
    "pynvvideocodec",
    "quack-kernels",
    "tilelang",
    "tokenspeed-mla",
    "torch",
    "torchaudio",
    "torchcodec",
    "torchvision",
}
TRANSFORMERS = "transformers==5.17.0"


def kept(requirement: str) -> str | None:
    """A requirement of vLLM, ours in its place, or None."""
    if "extra ==" in requirement:
        return None
    match = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert match is not None, requirement
    name = match[0].lower().replace("_", "-")
    if name in GPU_ONLY:
        return None
    return TRANSFORMERS if name == "transformers" else requirement


if __name__ == "__main__":
    wanted = (kept(each) for each in importlib.metadata.requires("vllm") or [])
    print("\n".join(each for each in wanted if each))  # noqa: T201
