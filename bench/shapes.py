"""Configurations of real models, whose shapes random weights have."""

from __future__ import annotations

from dataclasses import replace

from polarlm.model_loaders.config import (
    Attention,
    Experts,
    GatedDelta,
    GatedMLP,
    LatentAttention,
    Layer,
    ModelConfig,
    RopeConfig,
    ShortConv,
)


def llama(
    layers: int = 32,
    hidden_size: int = 4096,
    ffn_size: int = 14336,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    vocab_size: int = 128256,
    max_context: int = 131072,
    theta: float = 500_000.0,
) -> ModelConfig:
    """A Llama 3.1 of these sizes, which are the 8B's by default."""
    layer = Layer(Attention(heads, kv_heads, head_dim, RopeConfig(theta)), GatedMLP(ffn_size))
    return ModelConfig("llama", (layer,) * layers, hidden_size, vocab_size, max_context=max_context, norm_eps=1e-5)


LLAMA_8B = llama()
_TINYLLAMA = llama(22, 2048, 5632, 32, 4, 64, 32_000, 8192, 10_000.0)  # the context of the original is 2,048
_7B = llama(32, 4096, 14_336, 32, 8, 128, 32_000, 8192, 10_000.0)
_QWEN2_5_LAYER = Layer(Attention(12, 2, 128, RopeConfig(1e6), qkv_bias=True), GatedMLP(8960))
_QWEN2_5_1_5B = ModelConfig("qwen2", (_QWEN2_5_LAYER,) * 28, 1536, 151_936, 32_768, 1e-6, tied_head=True)

_LFM2_NETWORK = GatedMLP(4608)
_LFM2_ATTENTION = Layer(Attention(16, 8, 64, RopeConfig(1e6), qk_norm="head"), _LFM2_NETWORK)
_LFM2_CONV = Layer(ShortConv(1024, 3), _LFM2_NETWORK)
_LFM2_LAYERS = tuple(_LFM2_ATTENTION if layer in (2, 5, 8, 10, 12, 14) else _LFM2_CONV for layer in range(16))
_LFM2_350M = ModelConfig("lfm2", _LFM2_LAYERS, 1024, 65_536, 128_000, 1e-5, tied_head=True)

_OLMOE_LAYER = Layer(Attention(16, 16, 128, RopeConfig(), qk_norm="all"), Experts(64, 8, 1024))
_OLMOE_1B_7B = ModelConfig("olmoe", (_OLMOE_LAYER,) * 16, 2048, 50_304, 4096, 1e-5)

_MINILM_ATTENTION = Attention(12, 12, 32, None, qkv_bias=True, out_bias=True, is_causal=False)
_MINILM_LAYER = Layer(_MINILM_ATTENTION, GatedMLP(1536, "gelu", bias=True), "sums")
_MINILM_L6 = ModelConfig(
    *("bert", (_MINILM_LAYER,) * 6, 384, 30_522, 512, 1e-12), tied_head=True, positions=512, token_types=2
)

_QWEN3_ATTENTION = Attention(32, 4, 128, RopeConfig(1e6), qk_norm="head")
_QWEN3_LAYER = Layer(_QWEN3_ATTENTION, Experts(128, 8, 768, renormalize=True))
QWEN3_30B_A3B = ModelConfig("qwen3_moe", (_QWEN3_LAYER,) * 48, 2048, 151_936, 40_960, 1e-6)

_YARN = RopeConfig(theta=150_000.0, kind="yarn", factor=32.0, original_context=4096, truncate=False)
_GPT_OSS_ATTENTION = Attention(64, 8, 64, _YARN, sink_scores=True, qkv_bias=True, out_bias=True)
_GPT_OSS_EXPERTS = Experts(32, 4, 2880, "swiglu_clamped", bias=True, renormalize=True, router_bias=True)
_GPT_OSS_WINDOWED = Layer(replace(_GPT_OSS_ATTENTION, window=128), _GPT_OSS_EXPERTS)
_GPT_OSS_LAYERS = (_GPT_OSS_WINDOWED, Layer(_GPT_OSS_ATTENTION, _GPT_OSS_EXPERTS)) * 12
GPT_OSS_20B = ModelConfig("gpt_oss", _GPT_OSS_LAYERS, 2880, 201_088, 131_072, 1e-5)


def qwen3_5(layers: int, hidden_size: int, ffn_size: int, heads: int, kv_heads: int, value_heads: int) -> ModelConfig:
    """A Qwen3.5 of these sizes: three layers of four have a gated delta rule."""
    rope = RopeConfig(theta=1e7, sections=(11, 11, 10), sections_take_turns=True)
    attention = Attention(heads, kv_heads, 256, rope, qk_norm="head", output_gate=True, rotary_dim=64)
    rule, network = GatedDelta(16, value_heads, 128, 128, 4), GatedMLP(ffn_size)
    kinds = (*(Layer(rule, network),) * 3, Layer(attention, network)) * (layers // 4)
    return ModelConfig("qwen3_5", kinds, hidden_size, vocab_size=248_320, max_context=262_144, norm_eps=1e-6)


QWEN3_5_0_8B = qwen3_5(24, 1024, 3584, 8, 2, 16)

# The first layer has experts as well, and a vocabulary of 102,400 rows is left out.
_DEEPSEEK_YARN = RopeConfig(kind="yarn", factor=40.0, original_context=4096, mscale=0.707, mscale_all_dim=0.707)
_DEEPSEEK_ATTENTION = LatentAttention(16, 1, 576, _DEEPSEEK_YARN, 64, scale=0.1147, own_dim=128, value_dim=128)
_DEEPSEEK_LAYER = Layer(_DEEPSEEK_ATTENTION, Experts(64, 6, 1408, shared=GatedMLP(2816)))
DEEPSEEK_V2_LITE = ModelConfig("deepseek_v2", (_DEEPSEEK_LAYER,) * 27, 2048, 32_000, 163_840, 1e-6)

SHAPES = {
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "tinyllama-1.1b": _TINYLLAMA,
    "7b": _7B,
    "llama-8b": LLAMA_8B,
    "qwen2.5-1.5b": _QWEN2_5_1_5B,
    "lfm2-350m": _LFM2_350M,
    "qwen3.5-0.8b": replace(QWEN3_5_0_8B, tied_head=True),
    "qwen3.5-4b": qwen3_5(32, 2560, 9216, 16, 4, 32),
    "olmoe-1b-7b": _OLMOE_1B_7B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "minilm-l6": _MINILM_L6,
}
