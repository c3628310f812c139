"""Every row of the table against `transformers`: small random weights as GGUF files; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.llm.convert import (
    COMMON,
    CONTEXT,
    HEADS,
    Case,
    by_head,
    convert,
    neighbours,
    one_more,
    random_model,
    transposed,
)
from whit import Context
from whit.llm.arch import ARCHITECTURES
from whit.llm.model import Model

PLAIN = {"rope_theta": 10000.0, "rope_type": "default"}
CASES = {
    "llama": Case("LlamaForCausalLM", "llama", change=neighbours),
    "llama, biases": Case(
        "LlamaForCausalLM", "llama", {"attention_bias": True, "mlp_bias": True}, change=neighbours
    ),
    "mistral": Case(
        "MistralForCausalLM", "llama", {"head_dim": 16, "sliding_window": None}, change=neighbours
    ),
    "linear rope": Case(
        "LlamaForCausalLM",
        "llama",
        {"rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        neighbours,
    ),
    "yarn": Case(
        "Qwen2ForCausalLM",
        "qwen2",
        {
            "rope_parameters": {
                **PLAIN,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
    ),
    "qwen2": Case("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Case("Qwen3ForCausalLM", "qwen3", {"head_dim": 16}),
    "gemma": Case(
        "GemmaForCausalLM", "gemma", {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}, change=one_more
    ),
    "gemma2": Case(
        "Gemma2ForCausalLM",
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 6,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 2.0,
        },
        {"attention.sliding_window": 6, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
        one_more,
    ),
    "gemma3": Case(
        "Gemma3ForCausalLM",
        "gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 6,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            },
        },
        {"attention.sliding_window": 6, "rope.freq_base": 1000000.0},
        one_more,
    ),
    "phi2": Case("PhiForCausalLM", "phi2", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    "phi3": Case("Phi3ForCausalLM", "phi3", {"sliding_window": None}),
    "phi3, window": Case("Phi3ForCausalLM", "phi3", {"sliding_window": 6}, {"attention.sliding_window": 6}),
    "gpt2": Case(
        "GPT2LMHeadModel",
        "gpt2",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": CONTEXT, "n_inner": 48},
        {"attention.head_count_kv": HEADS},
        transposed,
    ),
    "starcoder": Case(
        "GPTBigCodeForCausalLM",
        "starcoder",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": CONTEXT, "n_inner": 48},
        {"attention.head_count_kv": 1},
    ),
    "starcoder2": Case("Starcoder2ForCausalLM", "starcoder2", {"sliding_window": None}),
    "falcon": Case(
        "FalconForCausalLM",
        "falcon",
        {"new_decoder_architecture": False, "multi_query": True, "bias": False, "ffn_hidden_size": 48},
        {"attention.head_count_kv": 1},
        by_head,
    ),
    "falcon, grouped": Case(
        "FalconForCausalLM",
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False, "ffn_hidden_size": 48},
        {"attention.head_count_kv": 2},
        by_head,
    ),
    "gptneox": Case(
        "GPTNeoXForCausalLM",
        "gptneox",
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        {"use_parallel_residual": True, "attention.head_count_kv": HEADS},
        by_head,
    ),
    "gptneox, one after the other": Case(
        "GPTNeoXForCausalLM",
        "gptneox",
        {"use_parallel_residual": False, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        {"use_parallel_residual": False, "attention.head_count_kv": HEADS},
        by_head,
    ),
    "olmo": Case("OlmoForCausalLM", "olmo", {"clip_qkv": 0.5}, {"attention.clamp_kqv": 0.5}, neighbours),
    "olmo2": Case("Olmo2ForCausalLM", "olmo2"),
    "stablelm": Case(
        "StableLmForCausalLM", "stablelm", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}
    ),
    "stablelm, parallel": Case(
        "StableLmForCausalLM",
        "stablelm",
        {"use_parallel_residual": True, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    ),
    "command-r": Case("CohereForCausalLM", "command-r", {"logit_scale": 0.3}, {"logit_scale": 0.3}),
    "cohere2": Case(
        "Cohere2ForCausalLM",
        "cohere2",
        {"logit_scale": 0.3, "sliding_window": 6, "num_hidden_layers": 4},
        {"logit_scale": 0.3, "attention.sliding_window": 6},
    ),
    "granite": Case(
        "GraniteForCausalLM",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.5, "logit_scale": 2.0},
        neighbours,
    ),
    "smollm3": Case("SmolLM3ForCausalLM", "smollm3", {"num_hidden_layers": 4}, change=neighbours),
    "nemotron": Case(
        "NemotronForCausalLM",
        "nemotron",
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        change=one_more,
    ),
    "glm4": Case("Glm4ForCausalLM", "glm4", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    "exaone4": Case(
        "Exaone4ForCausalLM",
        "exaone4",
        {"sliding_window": 6, "sliding_window_pattern": 4, "num_hidden_layers": 4},
        {"attention.sliding_window": 6},
    ),
    "arcee": Case("ArceeForCausalLM", "arcee", change=neighbours),
    "seed_oss": Case("SeedOssForCausalLM", "seed_oss"),
    "ernie4_5": Case("Ernie4_5ForCausalLM", "ernie4_5"),
}


def logits_of(model: Any, tokens: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def check_logits(path: Path, model: Any, count: int = 11) -> None:
    """A prompt in one piece, then token by token, in steps without a recording."""
    rng = np.random.default_rng(5)
    tokens = [int(t) for t in rng.integers(3, COMMON["vocab_size"], count)]
    want = logits_of(model, tokens)
    with Context(JIT=0):
        ours = Model.load(path, cache_dtype="float32")
        cache = ours.new_cache(1, 32)
        got = [ours.forward([tokens[:8]], [0], cache, every=True).numpy()[0]]
        got += [ours.forward([[token]], [8 + n], cache).numpy() for n, token in enumerate(tokens[8:])]
    np.testing.assert_allclose(np.concatenate(got), want, atol=3e-5 * np.abs(want).max(), rtol=0)


VARIANTS = ("llama, biases", "mistral", "phi3, window", "falcon, grouped", "stablelm, parallel", "starcoder")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in VARIANTS else n for n in CASES]
)
def test_logits(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = random_model(case)
    convert(case, tmp_path / "model.gguf", model)
    check_logits(tmp_path / "model.gguf", model)


def test_every_row_has_a_case() -> None:
    assert {case.arch for case in CASES.values()} == set(ARCHITECTURES)


def test_frequencies_of_llama3(tmp_path: Path) -> None:
    """The file has what each frequency is divided by."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**PLAIN, "rope_type": "llama3", "original_max_position_embeddings": 16, **scaling}
    case = Case("LlamaForCausalLM", "llama", {"rope_parameters": rope, "head_dim": 16}, change=neighbours)
    model = random_model(case)
    turned = model.model.rotary_emb.inv_freq.numpy()
    plain = 10000.0 ** (-np.arange(8) / 8)
    assert np.abs(plain / turned - 1).max() > 1
    convert(case, tmp_path / "m.gguf", model, {"rope_freqs.weight": (plain / turned).astype(np.float32)})
    check_logits(tmp_path / "m.gguf", model)


@pytest.mark.parametrize("original", [8, CONTEXT])
def test_factors_for_long_and_short_contexts(original: int, tmp_path: Path) -> None:
    factors = {
        "long": [1.0 + n for n in range(4)],
        "short": [1.5 + 0.25 * n for n in range(4)],
    }
    rope = {
        **PLAIN,
        "rope_type": "longrope",
        "long_factor": factors["long"],
        "short_factor": factors["short"],
        "original_max_position_embeddings": original,
    }
    stretch = float(np.sqrt(1 + np.log(CONTEXT / original) / np.log(original)))
    options = {"sliding_window": None, "original_max_position_embeddings": original, "rope_parameters": rope}
    case = Case(
        "Phi3ForCausalLM",
        "phi3",
        options,
        {"rope.scaling.attn_factor": stretch, "rope.scaling.original_context_length": original},
    )
    extra = {f"rope_factors_{k}.weight": np.array(v, np.float32) for k, v in factors.items()}
    model = random_model(case)
    convert(case, tmp_path / "m.gguf", model, extra)
    check_logits(tmp_path / "m.gguf", model)
