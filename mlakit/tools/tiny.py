"""`mlakit tiny`: a small checkpoint with random weights and a tokenizer, of the kind of a release.

The config is the release's with small sizes, so everything that reads a checkpoint takes its way:
the FP8 blocks of DeepSeek-V3, the indexer of DeepSeek-V3.2. The text that it writes has no sense.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlakit.formats import E4M3_MAX
from mlakit.model.geometry import PRESETS
from mlakit.model.releases import ALIASES, RELEASES
from mlakit.steps.weights import BLOCK

LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "initializer_range": 0.1,  # attention is far from uniform
    "bos_token_id": None,
    "eos_token_id": None,  # text ends where the caller says
    "pad_token_id": 0,
    # every MLP is dense, by the names of both kinds of configs
    "first_k_dense_replace": LAYERS,
    "mlp_layer_types": ["dense"] * LAYERS,
    "n_routed_experts": 8,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_mtp_layers": 0,
}
INDEX_SIZES = {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 16}
OTHER_TYPES = {"kimi_k2": "deepseek_v3"}  # transformers has the layers under this name
# transformers has no class for the text model of one, another's RoPE fits its own sizes only, and
# the others have sizes or layers that are not among those above
_OTHERS = (
    "mistral-small-4",
    "minicpm3",
    "deepseek-v4-flash",
    "deepseek-v4-pro",
    "glm-5.3-flash",
    "kimi-k3",
    "hy4-preview",
    "longcat-2.0",
)
MODELS = tuple(name for name in PRESETS if name not in _OTHERS)
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
FLOAT_MATRICES = ("weights_proj", "embed_tokens", "lm_head", "mlp.gate.")  # of FP8 releases


def release_of(model: str) -> str:
    """Return the name of a release in `MODELS`, from its name, an alias or a Hub id."""
    name = ALIASES.get(model.lower(), model.lower())
    if name not in MODELS:
        raise ValueError(f"MODEL must be one of {', '.join(MODELS)}, got {model!r}")
    return name


def config_fields(name: str) -> dict[str, Any]:
    """Return the fields of a release's config, with small sizes."""
    release = RELEASES[name]
    sizes = SIZES | (INDEX_SIZES if "index_topk" in release else {})
    if release["q_lora_rank"] is None:
        sizes["q_lora_rank"] = None
    if "indexer_types" in release:
        sizes["indexer_types"] = ["full", *["shared"] * (LAYERS - 1)]
    fields = {key: value for key, value in release.items() if key != "quantization_config"}
    return fields | sizes


def write(model: str, folder: Path, *, seed: int = 0) -> str:
    """Write the checkpoint into an empty or new folder; return the release that it resembles."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name = release_of(model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"DIR must be a new or empty folder, got {folder}")
    fields = config_fields(name)
    kind = fields.pop("model_type")
    config = AutoConfig.for_model(OTHER_TYPES.get(kind, kind), **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made.to(torch.bfloat16).save_pretrained(folder)
    if (RELEASES[name].get("quantization_config") or {}).get("quant_method") == "fp8":
        _quantise(folder)
    _tokenizer().save_pretrained(folder)
    return name


def _quantise(folder: Path) -> None:
    """Store the matrices of the layers as the FP8 releases do."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, values in load_file(path).items():
        if values.ndim == 2 and not any(each in name for each in FLOAT_MATRICES):
            tensors[name], tensors[f"{name}_scale_inv"] = in_blocks(values.float())
        else:
            tensors[name] = values
    save_file(tensors, path, metadata={"format": "pt"})
    config = folder / "config.json"
    fields = json.loads(config.read_text("utf-8")) | {"quantization_config": FP8_CONFIG}
    config.write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


def in_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix as e4m3 with one float32 scale per 128 × 128 block.

    The last blocks of an axis may be short.
    """
    rows, columns = values.shape
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    padded = values.new_zeros(blocks[0] * BLOCK, blocks[1] * BLOCK)
    padded[:rows, :columns] = values
    tiles = padded.view(blocks[0], BLOCK, blocks[1], BLOCK)
    scale = tiles.abs().amax((1, 3)) / E4M3_MAX
    codes = (tiles / scale[:, None, :, None]).view_as(padded)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn), scale


def _tokenizer() -> Any:
    """Return a tokenizer with a token for each of 256 printable characters; others become "?"."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    ranges = (range(0x20, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100), range(0x100, 0x200))
    characters = [chr(code) for codes in ranges for code in codes][: SIZES["vocab_size"]]
    words = {character: i for i, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
