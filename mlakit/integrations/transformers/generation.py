"""`mlakit generate`: a local checkpoint, patched, with tokens per second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlakit import V4Cache
from mlakit.formats import ENGINE_NAMES, Format
from mlakit.integrations.transformers.patching import patch
from mlakit.model.releases import download_hint

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEVICES = ("auto", "cpu", "cuda")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "*.model", "vocab.*")


class CacheUse(NamedTuple):
    """The memory of a cache."""

    tokens: int
    allocated_bytes: int
    bytes_per_token: float  # of all layers; a pool's free rows do not count


@dataclass(frozen=True)
class Run:
    """The greedy continuation of a prompt, and how long it took."""

    tokens: list[int]  # new ones
    prefill_seconds: float  # until the first new token
    decode_seconds: float  # of the others
    cache: CacheUse | None = None

    @property
    def tokens_per_second(self) -> float:
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0

    def common_prefix(self, other: Run) -> int:
        """The number of first tokens that both runs have."""
        pairs = zip(self.tokens, other.tokens, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(self.tokens))


class LocalModel:
    """A model and its tokenizer, from a folder."""

    def __init__(
        self, folder: Path, *, dtype: str = "auto", device: str = "auto", has_text: bool = True
    ) -> None:
        """Load a model. Raises ValueError for what is wrong with the folder or an argument.

        dtype     of the weights: a key of `DTYPES`, torch's name, or auto: the checkpoint's
        has_text  a tokenizer is needed; otherwise one is loaded if the folder has it
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        check_folder(folder)
        weights = loaded_dtype(dtype)
        where = loaded_device(device)
        has_tokenizer = any(next(folder.glob(name), None) for name in TOKENIZER_FILES)
        if has_text and not has_tokenizer:
            raise ValueError(f"{folder} has no tokenizer: save one there, or give --ids 11,42,7")
        try:
            self.tokenizer: Any = None
            if has_tokenizer:
                self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=weights, attn_implementation="eager", local_files_only=True
            )
        except (OSError, ValueError, ImportError, KeyError) as error:
            if isinstance(error, ModuleNotFoundError):
                raise
            said = next(iter(str(error).strip().splitlines()), "")
            raise ValueError(f"transformers cannot load {folder}: {said}") from None
        self.model: Any = model.to(where).eval()  # type: ignore[arg-type]

    def patch(self, *, format: Format | None, page_size: int) -> None:
        patch(self.model, format=format, page_size=page_size)

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens, or their numbers without a tokenizer."""
        if self.tokenizer is None:
            return " ".join(map(str, ["", *tokens]))
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def ids(self, prompt: str) -> list[int]:
        """Return the tokens of a text."""
        found: list[int] = self.tokenizer(prompt)["input_ids"]
        return found

    def check_ids(self, ids: list[int]) -> None:
        """Raise ValueError for ids that the model has no embedding of."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        wrong = [each for each in ids if not 0 <= each < vocabulary]
        if wrong or not ids:
            got = wrong[0] if wrong else "none"
            raise ValueError(f"ids must be token ids in [0, {vocabulary}), got {got}")

    def generate(self, prompt: list[int], count: int, progress: Callable[[int], object]) -> Run:
        """Generate at most `count` greedy tokens; call `progress` with the number of new ones."""
        given = torch.tensor([prompt], dtype=torch.int64, device=self.model.device)
        watch = Stopwatch(len(prompt), progress)
        start = perf_counter()
        found = self.model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            do_sample=False,
            stopping_criteria=[watch],
            return_dict_in_generate=True,
        )
        first = watch.seconds[0]
        tokens = found.sequences[0, watch.prompt :].tolist()
        use = cache_use(found.past_key_values)
        return Run(tokens, first - start, watch.seconds[-1] - first, use)


def check_folder(folder: Path) -> None:
    """Raise ValueError for what is no folder of a checkpoint."""
    if (folder / "config.json").is_file():
        return
    if folder.is_dir():
        raise ValueError(f"{folder} is not a checkpoint folder: config.json is missing")
    hint = download_hint(str(folder))
    raise ValueError(f"{folder} is not a checkpoint folder: there is no such folder{hint}")


def loaded_dtype(name: str) -> torch.dtype | str:
    """Return what `from_pretrained` takes as `dtype`."""
    if name == "auto":
        return name
    found = DTYPES.get(ENGINE_NAMES.get(name, name))
    if found is None:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {name!r}")
    return found


def loaded_device(name: str) -> str:
    """Return the device of a name in `DEVICES`."""
    if name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu on a machine without a GPU, got 'cuda'")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def cache_bytes(cache: Any) -> int:
    """Bytes that the tensors of a cache have: rows or K and V, and index keys."""
    rows = (each for pool in _pools(cache) for each in _pool_tensors(pool))
    return sum(map(_bytes, [*rows, *_own_tensors(cache)]))


def cache_use(cache: Any) -> CacheUse:
    """The memory of a cache after a run of one request."""
    tokens = int(cache.get_seq_length())
    per_token = sum(map(_bytes, _own_tensors(cache))) / tokens
    for pool in _pools(cache):
        per_token += _token_bytes(pool)
    return CacheUse(tokens, cache_bytes(cache), per_token)


def _pools(cache: Any) -> list[Any]:
    return list(dict.fromkeys(layer.pool for layer in cache.layers if hasattr(layer, "pool")))


def _token_bytes(pool: Any) -> float:
    """Bytes that each further token adds to a pool."""
    if isinstance(pool.cache, V4Cache):
        return pool.cache.token_bytes
    rows: int = pool.cache.num_pages * pool.cache.page_size
    return sum(map(_bytes, _pool_tensors(pool))) / rows


def _pool_tensors(pool: Any) -> list[Tensor]:
    caches = pool.cache.caches if isinstance(pool.cache, V4Cache) else [pool.cache]
    stored = (part for cache in caches for part in (cache.payload, cache.beside))
    return [each for each in stored if each is not None]


def _own_tensors(cache: Any) -> list[Tensor]:
    names = ("keys", "values", "indexer_keys")
    found = [getattr(layer, name, None) for layer in cache.layers for name in names]
    for layer in cache.layers:  # of DeepSeek-V4
        found += getattr(layer, "compressed_kv", {}).values()
    return [each for each in found if isinstance(each, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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
