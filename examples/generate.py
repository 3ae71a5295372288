"""Generate with a model of transformers on mlakit: patch it, then call generate() as before.

    python examples/generate.py                                   # a small random model
    python examples/generate.py DeepSeek-V2-Lite --device cuda    # a folder of a checkpoint

It needs transformers: pip install '.[transformers]' in the folder of mlakit.

Two prompts of different lengths share a batch. The same tokens come from eager attention first,
and the last lines have the bytes of both caches. With 16-bit weights rounding may select another
token, so only the small float32 model must agree; the exit status is 1 if it does not.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor

try:
    from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache
except ModuleNotFoundError:
    sys.exit("examples/generate.py needs transformers: pip install '.[transformers]'")

from mlakit.integrations.transformers import patch

PROMPTS = ([11, 42, 7, 19, 23, 5], [8, 31])
PADDING = 0


def small_model() -> Any:
    """Three layers of the kind of DeepSeek-V3, with random weights."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        initializer_range=0.15,
        eos_token_id=None,
        pad_token_id=PADDING,
    )
    return AutoModelForCausalLM.from_config(config)


def padded(prompts: tuple[list[int], ...]) -> tuple[Tensor, Tensor]:
    """Token ids and mask [batch, columns], padded on the left."""
    columns = max(map(len, prompts))
    ids = [[PADDING] * (columns - len(each)) + each for each in prompts]
    mask = [[0] * (columns - len(each)) + [1] * len(each) for each in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def generate(model: Any, count: int) -> tuple[Tensor, Any]:
    """`count` greedy tokens after each prompt, and the cache."""
    ids, mask = (each.to(model.device) for each in padded(PROMPTS))
    cache = DynamicCache(config=model.config)
    found = model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=count, do_sample=False
    )
    return found[:, ids.shape[1] :], cache


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="a local checkpoint; a small model if left out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=16)
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.folder) if given.folder else small_model()
    model = model.to(given.device).eval()
    eager, _ = generate(model, given.tokens)
    patch(model)
    ours, cache = generate(model, given.tokens)
    for tokens in ours.tolist():
        print(*tokens)
    pool = cache.layers[0].pool
    print("cached tokens without padding:", *(each.length for each in pool.sequences))
    print("bytes per token and layer:", pool.cache.row.width * pool.cache.payload.element_size())
    is_equal = torch.equal(ours, eager)
    print("eager attention agrees" if is_equal else "eager attention differs")
    return 0 if is_equal or given.folder else 1


if __name__ == "__main__":
    sys.exit(main())
