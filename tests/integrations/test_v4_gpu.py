"""Patched DeepSeek-V4 on a GPU: tokens and logits in float32, rows of 584 bytes in bf16."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from mlakit.integrations.transformers import patch
from tests.integrations.v4_models import build, padded, prompt

pytestmark = pytest.mark.gpu

NEW = 12
WIDE = {"num_attention_heads": 64, "o_groups": 8, "index_n_heads": 64, "sliding_window": 128}


def test_tokens_and_logits_in_float32():
    model = build("rows of 448 + 64", **WIDE).cuda()
    rows = [prompt(300, 1).cuda(), prompt(170, 2).cuda()]
    how = {"max_new_tokens": NEW, "do_sample": False}
    exact = [model.generate(row[None], **how, use_cache=False)[0] for row in rows]
    logits = [model(row[None], use_cache=False).logits[0] for row in exact]
    ids, mask = padded([row.cpu() for row in rows])
    patch(model)
    made = model.generate(
        ids.cuda(),
        attention_mask=mask.cuda(),
        return_dict_in_generate=True,
        output_logits=True,
        **how,
    )
    for i, right in enumerate(exact):
        assert torch.equal(made.sequences[i, -NEW:], right[-NEW:])
        own = torch.stack(made.logits)[:, i]
        assert (own - logits[i][-NEW - 1 : -1]).abs().max() < 1e-3


@pytest.mark.parametrize(("format", "factor"), [(None, 2), ("fp8_block64", 3)])
def test_bf16_is_about_as_close_to_float32_as_eager(format, factor):
    exact_model = build("rows of 448 + 64", **WIDE).cuda()
    ids = prompt(300).cuda()[None]
    exact = exact_model(ids, use_cache=False).logits
    model = exact_model.bfloat16()
    eager = model(ids, use_cache=False).logits.float()
    patch(model, format=format)
    cache, found, at = DynamicCache(config=model.config), [], 0
    with torch.no_grad():
        for size in (170, 99, *[1] * 6, 4, 21):
            found.append(model(ids[:, at : at + size], past_key_values=cache).logits)
            at += size
    assert at == 300
    error = (torch.cat(found, 1).float() - exact).square().mean().sqrt()
    assert error < factor * (eager - exact).square().mean().sqrt()
