"""The entry point of the group `sglang.srt.plugins`: a name for SGLang's registries."""

from __future__ import annotations

import warnings
from typing import Any

from mlakit.integrations.sglang import seams

NAME = "mlakit"


def register() -> None:
    """Make the backend known to SGLang by name; it is not selected by that.

    SGLang calls it in every process. Names that are registered already are left as they are. An
    SGLang of another release gets a warning and no backend: an error here would stop it for those
    who do not ask for one.
    """
    if refusal := seams.why_not():
        warnings.warn(refusal, stacklevel=2)
        return
    if NAME not in seams.ATTENTION_BACKEND_CHOICES:
        seams.add_attention_backend_choices([NAME])
    # without it, SGLang attends to long prefixes in the cache, absorbed, instead of expanding them
    if NAME not in seams.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
        seams.add_chunked_prefix_cache_attention_backend(NAME)
    if NAME not in seams.ATTENTION_BACKENDS:
        seams.register_attention_backend(NAME)(create_backend)


def create_backend(runner: Any, draft_step: int | None = None) -> Any:
    """The backend for the model of a ModelRunner: sparse where the model has an indexer.

    draft_step  of the decode of a draft model
    """
    from mlakit.integrations.sglang.backend import DenseBackend

    if not seams.is_deepseek_dsa(runner.model_config.hf_config):
        return DenseBackend(runner, draft_step)
    from mlakit.integrations.sglang.sparse import SparseBackend

    return SparseBackend(runner, draft_step)


def create_draft_steps(runner: Any, steps: int) -> Any:
    """The backends of a draft model's decode."""
    from mlakit.integrations.sglang.drafts import DraftSteps

    return DraftSteps(create_backend, runner, steps)
