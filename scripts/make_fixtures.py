"""Makes the tiny models under tests/fixtures with transformers, the reference of the tests.

    python -m venv reference && reference/bin/pip install torch transformers
    reference/bin/python scripts/make_fixtures.py [NAME ...]

With names, it makes these models alone; without, all of them and `rope.json`. Both bring `greedy.json` up to date.
Every model has random weights, scaled so that logits spread over a few units and the order of the tokens matters.
`reference.npz` next to each holds ids int64 (T,), logits float32 (T, V), inv_freq float32 (D/2,) and the scalar
attention_factor, and where there are two kinds of RoPE local_inv_freq or short_inv_freq, all computed by transformers
in float32 from the files as they were stored. `rope.json` holds frequencies of realistic RoPE settings.
`greedy.json` holds a prompt and its most likely continuation for some models, and of the step where it is closest the
margin of the token over the next one, and the most that a logit changes when keys and values are rounded, as a store
rounds them.
"""

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
TOKENS = 48
# A greedy run: tokens of its prompt, its steps, how many prompts there are to choose from at a time, and how often.
PROMPT, STEPS, PROMPTS, BATCHES = 24, 200, 64, 8
GREEDY = (  # beginnings of the names of models that have one
    *("gemma2", "gemma4", "muse_glimmer"),
    *("glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
)
FEW, APART = 4, 32  # different tokens of an answer that says little; see `greedy_run`
SEED = 20_240_607
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500.0}
GEMMA4 = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "global_head_dim": 32,
    "tie_word_embeddings": True,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "final_logit_softcapping": 8.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}

MUSE = {
    "vision_config": {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "patch_size": 2,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    },
    "out_hidden_size": 32,
    "projector_hidden_size": 16,
}

MAMBA2 = {"mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_head": 16, "mamba_d_conv": 3}
GRANITE = {
    "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
}
NEMOTRON = {
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
    "layer_norm_epsilon": 1e-5,
    "time_step_min": 1e-9,  # for initialization; transformers takes it for a limit
}

LFM2 = {
    "num_hidden_layers": 4,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "conv_L_cache": 3,
    "block_multiple_of": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}

DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
}
DELTA_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}

# name: (model type, type of the stored weights, spelling of config.json, changes to COMMON).
# The RoPE settings are scaled down to the context so that every branch of every kind acts on some channel.
MODELS = {
    "lfm2_tied": ("lfm2", "bfloat16", "new", LFM2),
    "lfm2_biases": (
        "lfm2",
        "float32",
        "new",
        {
            **LFM2,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 4,
            "conv_bias": True,
            "tie_word_embeddings": False,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2_moe_dense_first": (
        "lfm2_moe",
        "bfloat16",
        "new",
        {
            **LFM2,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "moe_intermediate_size": 24,
            "num_dense_layers": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "llama_mha": ("llama", "float32", "old", {"num_key_value_heads": 4}),
    "llama_gqa_linear": (
        "llama",
        "float16",
        "old",
        {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
        },
    ),
    "llama_gqa_llama3_tied": (
        "llama",
        "bfloat16",
        "old",
        {
            "hidden_size": 64,
            "tie_word_embeddings": True,
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 500.0},
        },
    ),
    "llama_mqa_yarn": (
        "llama",
        "bfloat16",
        "new",
        {
            "hidden_size": 64,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
            "rope_parameters": SHORT_YARN,
        },
    ),
    "llama_wide_heads_biases": ("llama", "float16", "new", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "mistral_window_sharded": ("mistral", "float16", "new", {"num_hidden_layers": 3, "sliding_window": 16}),
    "qwen2_bias": ("qwen2", "bfloat16", "old", {"use_sliding_window": False}),
    "qwen2_mixed_windows": (
        "qwen2",
        "float32",
        "old",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3_qk_norm_tied": ("qwen3", "float16", "new", {"head_dim": 16, "tie_word_embeddings": True}),
    # √64 is the same in every type; the scale of attention is not 1 / √16.
    "gemma3_tied": (
        "gemma3_text",
        "bfloat16",
        "new",
        {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 24,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    # Scores reach a few times the cap of theirs, and logits about theirs.
    "gemma2_capped_tied": (
        "gemma2",
        "bfloat16",
        "new",
        {
            "hidden_size": 64,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 24,
            "sliding_window": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma2_mqa": (
        "gemma2",
        "float16",
        "old",
        {
            "hidden_size": 64,
            "head_dim": 8,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 8,
            "sliding_window": 7,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": None,
        },
    ),
    # As in the models of 12B and 31B: the values of layers without a window are their keys before norm and RoPE.
    "gemma4_values_are_keys": (
        "gemma4_text",
        "bfloat16",
        "new",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
        },
    ),
    # As in E2B: embeddings of layers; the last layers share K/V and have wider networks. All heads have one size.
    "gemma4_shared_kv": (
        "gemma4_text",
        "float16",
        "new",
        {
            **GEMMA4,
            "num_hidden_layers": 4,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "global_head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
        },
    ),
    # As in 26B-A4B: experts beside the network of each layer.
    "gemma4_experts_beside": (
        "gemma4_text",
        "float16",
        "new",
        {
            **GEMMA4,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    ),
    # No released model has both: experts, and layers that share K/V, whose networks beside the experts are wider.
    "gemma4_experts_shared_kv": (
        "gemma4_text",
        "float16",
        "new",
        {
            **GEMMA4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "muse_glimmer_gated": (
        "muse_glimmer",
        "float16",
        "new",
        {
            **MUSE,
            "text_config": {
                **COMMON,
                "head_dim": 16,
                "num_hidden_layers": 3,
                "sliding_window": 12,
                "output_multiplier": 0.5,
                "final_logit_softcapping": 8.0,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "muse_glimmer_mqa": (
        "muse_glimmer",
        "bfloat16",
        "new",
        {
            **MUSE,
            "text_config": {
                **COMMON,
                "head_dim": 16,
                "num_hidden_layers": 4,
                "num_key_value_heads": 1,
                "sliding_window": 7,
                "qk_scale_factor": 1.5,
                "output_multiplier": 1.0,
                "final_logit_softcapping": 20.0,
                "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    # A head of keys for each two heads of values, whose dims differ.
    "qwen3_next_shared_keys": (
        "qwen3_next",
        "bfloat16",
        "new",
        {
            **DELTA,
            **DELTA_EXPERTS,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_value_head_dim": 12,
        },
    ),
    "qwen3_5_tied": (
        "qwen3_5_text",
        "bfloat16",
        "new",
        {**DELTA, "num_hidden_layers": 4, "linear_num_value_heads": 2, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe_with_images": (
        "qwen3_5_moe",
        "float16",
        "new",
        {
            "text_config": {
                **COMMON,
                **DELTA,
                **DELTA_EXPERTS,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_value_heads": 6,
                "linear_conv_kernel_dim": 3,
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "patch_size": 2,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
            },
        },
    ),
    "granite_hybrid_experts": (
        "granitemoehybrid",
        "bfloat16",
        "new",
        {
            **MAMBA2,
            **GRANITE,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 4,
            "intermediate_size": 32,
        },
    ),
    "granite_hybrid_tied": (
        "granitemoehybrid",
        "float16",
        "new",
        {
            **MAMBA2,
            **GRANITE,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "num_local_experts": 0,
            "mamba_n_groups": 2,
            "mamba_conv_bias": False,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    # A layer without a network.
    "nemotron_h_dense": (
        "nemotron_h",
        "bfloat16",
        "new",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
        },
    ),
    "nemotron_h_experts": (
        "nemotron_h",
        "float16",
        "new",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_groups": 1,
            "use_conv_bias": False,
        },
    ),
    "olmo2_post_norms": ("olmo2", "float32", "new", {"pad_token_id": 0}),
    "phi3_longrope_partial": (
        "phi3",
        "bfloat16",
        "new",
        {
            "hidden_size": 64,
            "pad_token_id": 0,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0, 1.05, 1.1, 1.2, 1.4, 1.8],
                "long_factor": [1.0, 1.3, 2.0, 3.5, 6.0, 8.0],
            },
        },
    ),
    "phi3_window": ("phi3", "float16", "old", {"pad_token_id": 0, "sliding_window": 16}),
    "smollm3_no_rope_tied": (
        "smollm3",
        "float16",
        "new",
        {"num_hidden_layers": 4, "pad_token_id": 0, "tie_word_embeddings": True},
    ),
    # The sizes of experts are no multiples of 16, the rows of a tile. No two experts of a token have scores so close to
    # each other that rounding the cache to halves would change the choice.
    "qwen3_moe_normed": (
        "qwen3_moe",
        "bfloat16",
        "new",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe_mixed_tied": (
        "qwen3_moe",
        "float16",
        "old",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe_shared": (
        "qwen2_moe",
        "bfloat16",
        "old",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "use_sliding_window": False,
        },
    ),
    "qwen2_moe_mixed_normed": (
        "qwen2_moe",
        "float16",
        "new",
        {
            "num_hidden_layers": 3,
            "qkv_bias": False,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
    ),
    "olmoe_all_heads": (
        "olmoe",
        "float16",
        "new",
        {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40, "pad_token_id": 0},
    ),
    "olmoe_normed_gqa": (
        "olmoe",
        "bfloat16",
        "old",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "intermediate_size": 24,
            "pad_token_id": 0,
        },
    ),
    "mixtral_window": (
        "mixtral",
        "bfloat16",
        "new",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "sliding_window": 16},
    ),
    "mixtral_one_of_three": (
        "mixtral",
        "float16",
        "old",
        {
            "num_key_value_heads": 1,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "intermediate_size": 32,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "glm4_moe_qk_norm": (
        "glm4_moe",
        "bfloat16",
        "new",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "glm4_moe_biases_two_shared": (
        "glm4_moe",
        "bfloat16",
        "new",
        {
            "attention_bias": True,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "num_nextn_predict_layers": 0,
        },
    ),
    "gpt_oss_transposed": (
        "gpt_oss",
        "bfloat16",
        "old",
        {
            "head_dim": 16,
            "max_position_embeddings": 128,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            "sliding_window": 16,
            "rope_parameters": {**SHORT_YARN, "truncate": False},
        },
    ),
    "gpt_oss_mxfp4": (
        "gpt_oss",
        "bfloat16",
        "new",
        {
            "hidden_size": 64,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "sliding_window": 12,
            "rope_parameters": {**SHORT_YARN, "truncate": False},
        },
    ),
}

# Released settings: Llama 2, linear with factor 4, Llama 3.1 and 3.2, Qwen2.5 with yarn, and yarn's variants.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768, "rope_theta": 1e6}
ROPES = {
    "llama2": (128, {"rope_type": "default", "rope_theta": 10_000.0}),
    "linear": (64, {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}),
    "llama3.1": (128, {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}),
    "llama3.2": (64, {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}),
    "yarn": (128, YARN),
    "yarn without rounding": (128, {**YARN, "truncate": False}),
    "yarn with its own magnitude": (64, {**YARN, "attention_factor": 1.25}),
    "yarn with mscale": (64, {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}),
    "yarn with betas": (64, {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}),
}


def randomize(model: torch.nn.Module, norm: float) -> None:
    """Random weights. Matrices preserve the magnitude of their input; q and k are larger, so that attention is
    selective.

    norm: the mean of the weights of norms.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data = torch.randn_like(parameter) - 2  # from half a token to many tokens until half has decayed
        elif name.endswith("linear_attn.norm.weight"):  # the only one there that is not added to 1
            parameter.data = 1 + 0.2 * torch.randn_like(parameter)
        elif "norm" in name or name.endswith(("router.scale", "per_expert_scale")):
            norm = 1 if name == "model.language_model.norm.weight" else norm  # the last one of Muse Glimmer
            parameter.data = norm + 0.2 * torch.randn_like(parameter)
            if name.endswith("router.scale"):
                parameter.data *= 4  # selective as well
        elif name.endswith("bias"):
            parameter.data = 0.5 * torch.randn_like(parameter)
        else:
            selective = (
                "q_proj",
                "k_proj",
                "qkv_proj",
                "mlp.gate.weight",
                "feed_forward.gate.weight",
                "mlp.router.weight",
                "router.proj",
            )
            scale = 1.6 if any(part in name for part in selective) else 2.0 if parameter.shape[0] == 96 else 1.0
            scale = 3.0 if name.endswith("experts.gate_up_proj") and model.config.model_type == "gpt_oss" else scale
            inputs = parameter.shape[1 if ".experts." in name and model.config.model_type == "gpt_oss" else -1]
            parameter.data = scale * torch.randn_like(parameter) / inputs**0.5
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.2 * torch.randn_like(buffer))
        elif name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.3 * torch.randn_like(buffer))


def spell_as_before(path: Path) -> None:
    """Rewrites a config.json to the spelling that transformers 4 wrote and most published models have."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    if kind == "linear":
        config["rope_scaling"] = {"type": kind, **rope}
    else:
        config["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    if "num_local_experts" in config:  # Mixtral's key; those of Qwen's models had another one
        config["num_experts"] = config.pop("num_local_experts")
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = 8  # published Qwen2 models have one that must be ignored
    path.write_text(json.dumps(config, indent=2) + "\n")


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def quantize_experts(folder: Path) -> None:
    """Rewrites the experts of gpt-oss as blocks of MXFP4: the sign and the number in FP4 of 32 values, and a power of
    two for all of them."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj") or ".experts." not in name:
            tensors[name] = tensor
            continue
        blocks = tensor.float().transpose(1, 2).unflatten(-1, (-1, 32))
        exponents = torch.floor(torch.log2(blocks.abs().amax(-1) / 4))
        scaled = blocks / 2 ** exponents[..., None]
        codes = (scaled.abs()[..., None] - FP4).abs().argmin(-1) + 8 * (scaled < 0)
        tensors[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}, indent=2) + "\n")


def stored_model(folder: Path) -> torch.nn.Module:
    """The model in a folder, in float32. Blocks of MXFP4 become matrices first, as transformers reads them."""
    config = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")
    if not hasattr(config, "quantization_config"):
        return class_of(config).from_pretrained(folder, config=config, dtype=torch.float32).eval()
    del config.quantization_config
    config.dtype = torch.float32
    model, tensors = transformers.AutoModelForCausalLM.from_config(config), load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        whole, blocks = name.removesuffix("_blocks"), tensors.pop(name)
        tensors[whole] = convert_moe_packed_tensors(blocks, tensors.pop(f"{whole}_scales"), dtype=torch.float32)
    model.load_state_dict(tensors)
    return model.eval()


def class_of(config: transformers.PreTrainedConfig) -> type:
    """The class that computes logits from tokens; that of a model for images computes them without any as well."""
    is_whole = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if is_whole else transformers.AutoModelForCausalLM


def make_model(name: str, model_type: str, dtype: str, spelling: str, changes: dict) -> None:
    folder = FIXTURES / "models" / name
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(SEED)
    common = {} if "text_config" in changes else COMMON
    config = transformers.AutoConfig.for_model(model_type, **{**common, **changes})
    model = class_of(config).from_config(config)
    adds_one = ("gemma2", "gemma3", "muse", "qwen3_next", "qwen3_5")  # norms multiply with 1 + w
    randomize(model, 0 if model_type.startswith(adds_one) else 1)
    shard = {"max_shard_size": "24KB"} if name.endswith("sharded") else {}
    model.to(getattr(torch, dtype)).save_pretrained(folder, **shard)
    if name.endswith("mxfp4"):
        quantize_experts(folder)
    if spelling == "old":
        spell_as_before(folder / "config.json")

    stored = stored_model(folder)
    ids = torch.randint(0, COMMON["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        logits = stored(ids).logits[0]
    decoder = getattr(stored.model, "language_model", stored.model)
    rotary = getattr(decoder, "rotary_emb", None) or getattr(decoder, "pos_emb", None)
    of_rope = {} if rotary is None else ropes(rotary)  # some models have none
    np.savez(folder / "reference.npz", ids=ids[0].numpy(), logits=logits.numpy(), **of_rope)
    print(f"{name}: logits {logits.std():.2f} on average, from {logits.min():.1f} to {logits.max():.1f}")


def ropes(rotary: torch.nn.Module) -> dict[str, np.ndarray | np.float64]:
    """The reference's frequencies, and its factor of cos and sin."""
    if hasattr(rotary, "full_attention_inv_freq"):
        return {
            "inv_freq": rotary.full_attention_inv_freq.numpy(),
            "attention_factor": np.float64(rotary.full_attention_attention_scaling),
            "local_inv_freq": rotary.sliding_attention_inv_freq.numpy(),
        }
    found = {"inv_freq": rotary.inv_freq.numpy(), "attention_factor": np.float64(rotary.attention_scaling)}
    if rotary.rope_type == "longrope":
        found["short_inv_freq"] = rotary.original_inv_freq.numpy()
    return found


class Rounded(transformers.DynamicCache):
    """Keys and values that are changed by up to 2⁻¹¹ of themselves, as rounding to halves may do, but at random."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *more: object) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (x * (1 + 2**-11 * (2 * torch.rand_like(x) - 1)) for x in (keys, values))
        return super().update(keys, values, *more)


def greedy_run(stored: torch.nn.Module) -> dict | None:
    """The most likely continuation of a random prompt; None if it is another one without a cache.

    Where the answers repeat one token for ever, a token may come again after APART others.
    """
    torch.manual_seed(SEED)  # of what `Rounded` changes
    generator = torch.Generator().manual_seed(SEED)
    runs: list[dict] = []
    for _ in range(BATCHES):
        prompts = torch.randint(5, COMMON["vocab_size"], (PROMPTS, PROMPT), generator=generator)
        run = best_run(stored, prompts, 0)
        if run is not None and len(set(run["answer"])) < FEW:
            run = best_run(stored, prompts, APART)
        if run is None:
            return None
        runs.append(run)
        if run["margin"] > 2 * run["error"]:
            break
    return max(runs, key=lambda run: run["margin"] / run["error"])


def best_run(stored: torch.nn.Module, prompts: torch.Tensor, apart: int) -> dict | None:
    """The continuation, of one of `prompts`, that varies and whose margins are largest beside what rounding changes.

    Its different tokens are at least half as many as those of any other one. apart: last tokens that do not come again.
    """

    def allowed(logits: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return logits.scatter(1, before[:, max(0, before.shape[1] - apart) :], -torch.inf)

    ids = prompts
    with torch.no_grad():
        found = stored(ids, use_cache=True)
        for step in range(STEPS):
            ids = torch.cat([ids, allowed(found.logits[:, -1], ids).argmax(-1, keepdim=True)], 1)
            if step + 1 < STEPS:
                found = stored(ids[:, -1:], past_key_values=found.past_key_values, use_cache=True)
        logits, *rounded = (
            stored(ids, past_key_values=cache(config=stored.config), use_cache=True).logits[:, PROMPT - 1 : -1]
            for cache in (transformers.DynamicCache, *[Rounded] * 3)
        )
    answers = ids[:, PROMPT:]
    errors = torch.stack([(one - logits).abs().amax(-1) for one in rounded]).amax(0)
    logits = torch.stack([allowed(logits[:, step], ids[:, : PROMPT + step]) for step in range(STEPS)], 1)
    first, second = logits.topk(2, -1).values.unbind(-1)
    ratios, steps = ((first - second) / errors).min(1)
    varied = torch.tensor([len(set(answer.tolist())) for answer in answers])
    same = (logits.argmax(-1) == answers).all(1)
    if not same.any():
        return None
    best = int(ratios.where(same & (varied >= varied.max() / 2), -1.0).argmax())
    step = steps[best]
    return {
        "prompt": prompts[best].tolist(),
        "apart": apart,
        "answer": answers[best].tolist(),
        "margin": round((first - second)[best, step].item(), 5),
        "error": round(errors[best, step].item(), 5),
    }


def make_greedy_runs(names: Iterable[str]) -> None:
    path = FIXTURES / "greedy.json"
    runs = json.loads(path.read_text()) if path.exists() else {}
    for name in filter(lambda name: name.startswith(GREEDY), names):
        found = greedy_run(stored_model(FIXTURES / "models" / name))
        if found is None:
            print(f"{name}: without a cache, its answers are others")
            continue
        runs[name] = found
        print(f"{name}: least margin {found['margin']:.4f}, where rounding changes {found['error']:.4f}")
    lines = (f"{json.dumps(name)}: {json.dumps(run, separators=(',', ':'))}" for name, run in sorted(runs.items()))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def make_ropes() -> None:
    cases = {}
    for name, (head_dim, rope) in ROPES.items():
        config = transformers.LlamaConfig(
            hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=131_072, rope_parameters=dict(rope)
        )
        if rope["rope_type"] == "default":
            rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
            frequencies, factor = rotary.inv_freq, rotary.attention_scaling
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
        cases[name] = {
            "head_dim": head_dim,
            "max_position_embeddings": 131_072,
            "rope_parameters": rope,
            "inv_freq": frequencies.tolist(),
            "attention_factor": factor,
        }
    (FIXTURES / "rope.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    for name in sys.argv[1:] or MODELS:
        make_model(name, *MODELS[name])
    make_greedy_runs(sys.argv[1:] or MODELS)
    if not sys.argv[1:]:
        make_ropes()
