"""Small checkpoints with the attention of DeepSeek-V3 or V3.2, and random weights.

Weights are large enough that attention decides tokens: scores have a standard deviation above 1.
The widths are those of the real models; the other layers are small, so that attention is a large
part of a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

VOCABULARY = 4096
HIDDEN = 2048
MLP, EXPERT_MLP = 4096, 512
KV_RANK, Q_RANK = 512, 1536
NOPE, ROPE, VALUE = 128, 64, 128
INDEX_HEADS, INDEX_WIDTH, TOPK = 64, 128, 2048
BLOCK = 128  # of the scales of FP8 weights
POSITIONS = 163_840
GAIN = 1.5  # of a projection: it multiplies the norm of what comes in


@dataclass(frozen=True)
class Model:
    """What differs between the models.

    heads    of attention: 16 as a rank of 8 has them, or 128
    experts  routed ones in the last layer, 0 for none
    """

    heads: int
    layers: int = 4
    experts: int = 0
    has_indexer: bool = False
    has_fp8_weights: bool = False
    hidden: int = HIDDEN
    index_topk: int = TOPK

    def config(self) -> dict[str, object]:
        kind = (
            ("DeepseekV32", "deepseek_v32") if self.has_indexer else ("DeepseekV3", "deepseek_v3")
        )
        made = {
            "architectures": [f"{kind[0]}ForCausalLM"],
            "model_type": kind[1],
            "torch_dtype": "bfloat16",
            "vocab_size": VOCABULARY,
            "hidden_size": self.hidden,
            "intermediate_size": MLP,
            "moe_intermediate_size": EXPERT_MLP,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "n_shared_experts": 1,
            "n_routed_experts": self.experts or 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "moe_layer_freq": 1,
            "first_k_dense_replace": self.layers - 1 if self.experts else self.layers,
            "kv_lora_rank": KV_RANK,
            "q_lora_rank": Q_RANK,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": VALUE,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": POSITIONS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "num_nextn_predict_layers": 0,
        }
        if self.has_indexer:
            made |= {
                "index_n_heads": INDEX_HEADS,
                "index_head_dim": INDEX_WIDTH,
                "index_topk": self.index_topk,
            }
        if self.has_fp8_weights:
            made["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
            }
        return made

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of every weight."""
        yield "model.embed_tokens.weight", (VOCABULARY, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield f"{prefix}input_layernorm.weight", (self.hidden,)
            yield f"{prefix}post_attention_layernorm.weight", (self.hidden,)
            for name, shape in self._attention():
                yield f"{prefix}self_attn.{name}", shape
            is_dense = not self.experts or layer < self.layers - 1
            yield from self._dense(f"{prefix}mlp.") if is_dense else self._experts(f"{prefix}mlp.")
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (VOCABULARY, self.hidden)

    def _attention(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "q_a_proj.weight", (Q_RANK, self.hidden)
        yield "q_a_layernorm.weight", (Q_RANK,)
        yield "q_b_proj.weight", (self.heads * (NOPE + ROPE), Q_RANK)
        yield "kv_a_proj_with_mqa.weight", (KV_RANK + ROPE, self.hidden)
        yield "kv_a_layernorm.weight", (KV_RANK,)
        yield "kv_b_proj.weight", (self.heads * (NOPE + VALUE), KV_RANK)
        yield "o_proj.weight", (self.hidden, self.heads * VALUE)
        if self.has_indexer:
            yield "indexer.wq_b.weight", (INDEX_HEADS * INDEX_WIDTH, Q_RANK)
            yield "indexer.wk.weight", (INDEX_WIDTH, self.hidden)
            yield "indexer.k_norm.weight", (INDEX_WIDTH,)
            yield "indexer.k_norm.bias", (INDEX_WIDTH,)
            yield "indexer.weights_proj.weight", (INDEX_HEADS, self.hidden)

    def _dense(self, prefix: str, width: int = MLP) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}gate_proj.weight", (width, self.hidden)
        yield f"{prefix}up_proj.weight", (width, self.hidden)
        yield f"{prefix}down_proj.weight", (self.hidden, width)

    def _experts(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}gate.weight", (self.experts, self.hidden)
        yield f"{prefix}gate.e_score_correction_bias", (self.experts,)
        yield from self._dense(f"{prefix}shared_experts.", EXPERT_MLP)
        for expert in range(self.experts):
            yield from self._dense(f"{prefix}experts.{expert}.", EXPERT_MLP)


MODELS = {
    "v3-h16": Model(16, layers=8),
    "v3-h128": Model(128, layers=4),
    "v3-h16-experts": Model(16, experts=8),
    "v3-h16-fp8-weights": Model(16, has_fp8_weights=True),
    "v3.2-h16": Model(16, layers=8, has_indexer=True),
    "v3.2-h128": Model(128, layers=4, has_indexer=True),
}
# projections that checkpoints of DeepSeek keep in bf16
NOT_FP8 = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "weights_proj")


def save(model: Model, folder: Path, device: str = "cpu") -> Path:
    """Write config.json and the weights, which a seed decides."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, shape in model.shapes():
        weight = _random(name, shape, generator)
        if model.has_fp8_weights and not any(each in name for each in NOT_FP8):
            payload, scales = _in_blocks(weight)
            tensors[name] = payload.cpu()
            tensors[f"{name}_scale_inv"] = scales.cpu()
        else:
            is_bias = name.endswith("e_score_correction_bias")
            tensors[name] = weight.to(torch.float32 if is_bias else torch.bfloat16).cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": POSITIONS}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    # written last: a folder that has it is whole
    (folder / "config.json").write_text(json.dumps(model.config(), indent=1))
    return folder


def _tokenizer() -> Tokenizer:
    """Make a tokenizer for servers that insist on one: token 7 is the word t7."""
    words = {f"t{number}": number for number in range(VOCABULARY)}
    made = Tokenizer(WordLevel(words, unk_token="t0"))
    made.pre_tokenizer = WhitespaceSplit()
    return made


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator, device=generator.device)
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * values
    if len(shape) == 1:
        return 0.1 * values
    return values if "embed" in name else values * (GAIN / shape[1] ** 0.5)


def _in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight as e4m3, and the scale of every block of BLOCK x BLOCK."""
    rows, columns = weight.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = weight.new_zeros(down * BLOCK, across * BLOCK)
    padded[:rows, :columns] = weight
    blocks = padded.view(down, BLOCK, across, BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / 448
    payload = (blocks / scales).view_as(padded)[:rows, :columns].to(torch.float8_e4m3fn)
    return payload.contiguous(), scales[:, 0, :, 0].contiguous()
