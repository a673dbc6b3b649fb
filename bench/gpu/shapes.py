"""Shapes of models whose steps are measured on a GPU or predicted."""

from __future__ import annotations

from dataclasses import replace

from polarlm.model_loaders.config import (
    Attention,
    Experts,
    GatedDelta,
    GatedMLP,
    Layer,
    Mamba2,
    ModelConfig,
    Recurrent,
    RopeConfig,
)


def llama(
    layers: int = 32,
    hidden_size: int = 4096,
    ffn_size: int = 14336,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    vocab_size: int = 128256,
) -> ModelConfig:
    """A Llama 3.1 of these sizes, which are the 8B's by default."""
    layer = Layer(Attention(heads, kv_heads, head_dim, RopeConfig(theta=500_000.0)), GatedMLP(ffn_size))
    return ModelConfig("llama", (layer,) * layers, hidden_size, vocab_size, max_context=131072, norm_eps=1e-5)


LLAMA_8B = llama()
LLAMA_70B = llama(layers=80, hidden_size=8192, ffn_size=28672, heads=64)

_QWEN3_30B_A3B_LAYER = Layer(
    Attention(32, 4, 128, RopeConfig(theta=1e6), qk_norm="head"), Experts(128, 8, 768, renormalize=True)
)
QWEN3_30B_A3B = ModelConfig(
    "qwen3_moe", (_QWEN3_30B_A3B_LAYER,) * 48, 2048, vocab_size=151_936, max_context=40_960, norm_eps=1e-6
)

_YARN = RopeConfig(theta=150_000.0, kind="yarn", factor=32.0, original_context=4096, truncate=False)
_GPT_OSS_ATTENTION = Attention(64, 8, 64, _YARN, sink_scores=True, qkv_bias=True, out_bias=True)
_GPT_OSS_EXPERTS = Experts(32, 4, 2880, "swiglu_clamped", bias=True, renormalize=True, router_bias=True)
GPT_OSS_20B = ModelConfig(
    "gpt_oss",
    (
        Layer(replace(_GPT_OSS_ATTENTION, window=128), _GPT_OSS_EXPERTS),
        Layer(_GPT_OSS_ATTENTION, _GPT_OSS_EXPERTS),
    )
    * 12,
    2880,
    vocab_size=201_088,
    max_context=131_072,
    norm_eps=1e-5,
)


def qwen3_5(layers: int, hidden_size: int, ffn_size: int, heads: int, kv_heads: int, value_heads: int) -> ModelConfig:
    """A Qwen3.5 of these sizes: three layers of four have a gated delta rule."""
    rope = RopeConfig(theta=1e7)
    attention = Attention(heads, kv_heads, 256, rope, qk_norm="head", output_gate=True, rotary_dim=64)
    rule, network = GatedDelta(16, value_heads, 128, 128, 4), GatedMLP(ffn_size)
    kinds = (*(Layer(rule, network),) * 3, Layer(attention, network)) * (layers // 4)
    return ModelConfig("qwen3_5", kinds, hidden_size, vocab_size=248_320, max_context=262_144, norm_eps=1e-6)


QWEN3_5_0_8B = qwen3_5(24, 1024, 3584, 8, 2, 16)
QWEN3_5_4B = qwen3_5(32, 2560, 9216, 16, 4, 32)

# Four of Granite's 40 layers have attention, one of ten.
_TINY_EXPERTS = Experts(64, 6, 512, renormalize=True, shared=GatedMLP(1024))
_TINY_MAMBA = Layer(Mamba2(1, 48, 128, 64, 4), _TINY_EXPERTS)
_TINY_ATTENTION = Layer(Attention(12, 4, 128, None, scale=1 / 128), _TINY_EXPERTS)
GRANITE_4_H_TINY = ModelConfig(
    "granitemoehybrid",
    (*(_TINY_MAMBA,) * 5, _TINY_ATTENTION, *(_TINY_MAMBA,) * 4) * 4,
    1536,
    vocab_size=100_352,
    max_context=131_072,
    norm_eps=1e-5,
)

# M is Mamba 2, * attention, E experts after either of them.
_NANO_LAYERS = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_NANO_MIXERS = {"M": Mamba2(8, 64, 128, 64, 4), "*": Attention(32, 2, 128, None)}
_NANO_EXPERTS = Experts(
    *(128, 6, 1856, "relu_squared"),
    scoring="sigmoid",
    renormalize=True,
    scale=2.5,
    choice_bias=True,
    shared=GatedMLP(3712, "relu_squared"),
)
NEMOTRON_3_NANO = ModelConfig(
    "nemotron_h",
    tuple(
        Layer(_NANO_MIXERS[kind], _NANO_EXPERTS if following == "E" else None)
        for kind, following in zip(_NANO_LAYERS, f"{_NANO_LAYERS[1:]}.", strict=True)
        if kind in _NANO_MIXERS
    ),
    2688,
    vocab_size=131_072,
    max_context=262_144,
    norm_eps=1e-5,
)


def shape_of(config: ModelConfig) -> dict[str, int]:
    """The sizes of a model that decide how long its steps take."""
    attention, ffn = config.attention, config.ffn
    states = [layer.mixer for layer in config.layers if isinstance(layer.mixer, Recurrent)]
    return {
        "layers": len(config.layers),
        "hidden_size": config.hidden_size,
        "ffn_size": ffn.size,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": config.vocab_size,
        **({"experts": ffn.count, "top_k": ffn.top_k} if isinstance(ffn, Experts) else {}),
        **({"state_layers": len(states), "state_heads": states[0].value_heads} if states else {}),
    }
