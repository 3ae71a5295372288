"""`mlakit generate`: a local checkpoint, patched, with tokens per second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from mlakit.formats import Format
from mlakit.integrations.transformers.patching import patch


@dataclass(frozen=True)
class Run:
    """The greedy continuation of a prompt, and how long it took."""

    tokens: list[int]  # new ones
    prefill_seconds: float  # until the first new token
    decode_seconds: float  # of the others

    @property
    def tokens_per_second(self) -> float:
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0

    def common_prefix(self, other: Run) -> int:
        """The number of first tokens that both runs have."""
        pairs = zip(self.tokens, other.tokens, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(self.tokens))


class LocalModel:
    """A model and its tokenizer, from a folder."""

    def __init__(self, folder: Path, *, dtype: str = "auto", device: str = "auto") -> None:
        """Load a model; `dtype` is that of the weights, such as bfloat16, or auto: the
        checkpoint's."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} is not a checkpoint folder: config.json is missing")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
        self.model: Any = model.to(device).eval()  # type: ignore[arg-type]

    def patch(self, *, format: Format | None, page_size: int) -> None:
        patch(self.model, format=format, page_size=page_size)

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def generate(self, prompt: str, count: int, progress: Callable[[int], object]) -> Run:
        """Generate at most `count` greedy tokens; call `progress` with the number of new ones."""
        given = self.tokenizer(prompt, return_tensors="pt").to(self.model.device)
        watch = Stopwatch(given["input_ids"].shape[1], progress)
        start = perf_counter()
        found = self.model.generate(
            input_ids=given["input_ids"],
            attention_mask=given["attention_mask"],
            max_new_tokens=count,
            do_sample=False,
            stopping_criteria=[watch],
        )
        first = watch.seconds[0]
        tokens = found[0, watch.prompt :].tolist()
        return Run(tokens, first - start, watch.seconds[-1] - first)


class Stopwatch:
    """A stopping criterion that stops nothing and notes when each token was there."""

    def __init__(self, prompt: int, progress: Callable[[int], object]) -> None:
        self.prompt, self.progress = prompt, progress
        self.seconds: list[float] = []

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.seconds.append(perf_counter())
        self.progress(input_ids.shape[1] - self.prompt)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
