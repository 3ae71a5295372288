"""`mlakit accuracy`: what each cache format costs a model, layer by layer and in perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from mlakit.dispatch.checks import UnsupportedError
from mlakit.formats import FLOAT_FORMATS, FORMATS, Format, known_format
from mlakit.integrations.transformers import checks, patch
from mlakit.integrations.transformers.generation import LocalModel
from mlakit.integrations.transformers.v4_attention import v4_modules
from mlakit.tools.columns import Column, fitting_table

EAGER = "eager"


@dataclass(frozen=True)
class Accuracy:
    """One format. `errors` is [layers]: the error of the attention's output / its size, RMS."""

    format: str
    perplexity: float
    errors: tuple[float, ...]


def measure(
    folder: Path, text: str | None, tokens: int, formats: Sequence[str], dtype: str, device: str
) -> list[Accuracy]:
    """Compare a model in each format with eager attention; ValueError for wrong arguments.

    text    None: random tokens, whose perplexity says nothing of a language
    tokens  the most of the text that are used
    """
    named = [known_format(each) for each in formats]
    model = LocalModel(folder, dtype=dtype, device=device, has_text=text is not None)
    ids = _ids(model, text, tokens)
    baseline, outputs = _run(model.model, ids)
    found = [Accuracy(EAGER, baseline, (0.0,) * len(outputs))]
    for format in named or _formats(model.model):
        try:
            with patch(model.model, format=format):
                perplexity, changed = _run(model.model, ids)
        except UnsupportedError as error:
            raise ValueError(str(error)) from None
        errors = tuple(map(_relative, changed, outputs))
        found.append(Accuracy(format, perplexity, errors))
    return found


def _ids(model: LocalModel, text: str | None, tokens: int) -> Tensor:
    if text is None:
        generator = torch.Generator().manual_seed(0)
        size = model.model.get_input_embeddings().num_embeddings
        return torch.randint(size, (1, tokens), generator=generator).to(model.model.device)
    found = model.ids(text)[:tokens]
    if len(found) < 2:
        raise ValueError(f"the text must have at least 2 tokens, got {len(found)}")
    return torch.tensor([found], device=model.model.device)


def _formats(model: Any) -> list[Format]:
    """Return the formats of rows that the model has, its own dtype first."""
    if v4_modules(model):  # whose rows have a format of FP8 of their own
        return [FLOAT_FORMATS[model.dtype], "fp8_block64", "mxfp4_block32"]
    others = [each for each in FORMATS if each not in FLOAT_FORMATS.values()]
    own = FLOAT_FORMATS[checks.kv_b_proj(_attentions(model)[0]).dtype]
    return [own, *(each for each in others if each != "fp8_block64")]


def _attentions(model: Any) -> list[torch.nn.Module]:
    """Return the modules whose outputs are compared: those with latent rows, by layer."""
    modules = checks.mla_modules(model) or v4_modules(model)
    if not modules:
        raise ValueError(f"{type(model).__name__} has no MLA attention")
    return modules


@torch.no_grad()
def _run(model: Any, ids: Tensor) -> tuple[float, list[Tensor]]:
    """Return the perplexity of the tokens, and the output of every MLA layer's attention."""
    outputs: dict[int, Tensor] = {}
    modules = _attentions(model)
    hooks = [
        module.register_forward_hook(lambda _, args, out, i=i: outputs.update({i: out[0].float()}))
        for i, module in enumerate(modules)
    ]
    try:
        logits = model(ids, use_cache=True).logits.float()
    finally:
        for hook in hooks:
            hook.remove()
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    return exp(float(loss)), [outputs[i] for i in range(len(modules))]


def _relative(actual: Tensor, exact: Tensor) -> float:
    return float((actual - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def table(found: Sequence[Accuracy], tokens: str, width: int) -> Table:
    """The errors layer by layer, and the perplexity below them.

    Eager attention is in the caption: errors are relative to it.
    """
    eager, *others = found
    caption = (
        f"{tokens}. Error of the attention's output / its size, RMS, with the errors of the layers "
        f"before; perplexity of the same tokens, {eager.perplexity:.4f} with eager attention."
    )
    formats = (Column(each.format, rank=i) for i, each in enumerate(others))
    rows = [
        [str(layer), *(f"{each.errors[layer]:.2e}" for each in others)]
        for layer in range(len(eager.errors))
    ]
    rows.append(["perplexity", *(f"{each.perplexity:.4f}" for each in others)])
    columns = (Column("layer", is_number=False), *formats)
    return fitting_table(columns, rows, width, caption=caption, grouped=False)
