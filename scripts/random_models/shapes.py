"""Sizes of real models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    arch: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int  # at least; that of the tokenizer if it is larger
    context: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False  # the embedding is the head, too
    qkv_bias: bool = False
    head_size: int = 0  # 0: hidden / heads
    qk_norm: str = ""  # "head" or "all"; see `model_loaders.config.QKNorm`
    experts: int = 0  # in each layer; 0: the layers are dense, with networks of size ffn
    experts_used: int = 0
    expert_ffn: int = 0
    window: int = 0  # of every second layer, in a model with sink scores and biases as gpt-oss has them; 0: none

    attending: tuple[int, ...] = ()  # layers with attention; the others have short convolutions. Empty: all
    value_heads: int = 0  # of the gated delta rules that three layers of four have, with 16 key heads; 0: none

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads


SHAPES = {
    # The context of the original is 2,048.
    "tinyllama-1.1b": Shape("llama", 22, 2048, 5632, 32, 4, 32_000, 8192),
    "7b": Shape("llama", 32, 4096, 14_336, 32, 8, 32_000, 8192),
    "qwen2.5-1.5b": Shape("qwen2", 28, 1536, 8960, 12, 2, 151_936, 32_768, 1e6, 1e-6, tied=True, qkv_bias=True),
    "lfm2-350m": Shape(
        *("lfm2", 16, 1024, 4608, 16, 8, 65_536, 128_000, 1e6),
        **{"tied": True, "qk_norm": "head", "attending": (2, 5, 8, 10, 12, 14)},
    ),
    **{
        f"qwen3.5-{name}": Shape(
            *("qwen35", layers, hidden, ffn, heads, kv_heads, 248_320, 262_144, 1e7, 1e-6),
            **{"tied": tied, "head_size": 256, "qk_norm": "head", "value_heads": value_heads},
        )
        for name, layers, hidden, ffn, heads, kv_heads, value_heads, tied in (
            ("0.8b", 24, 1024, 3584, 8, 2, 16, True),
            ("4b", 32, 2560, 9216, 16, 4, 32, True),
        )
    },
    "olmoe-1b-7b": Shape(
        "olmoe", 16, 2048, 1024, 16, 16, 50_304, 4096, qk_norm="all", experts=64, experts_used=8, expert_ffn=1024
    ),
    "qwen3-30b-a3b": Shape(
        *("qwen3moe", 48, 2048, 6144, 32, 4, 151_936, 40_960, 1e6, 1e-6),
        **{"head_size": 128, "qk_norm": "head", "experts": 128, "experts_used": 8, "expert_ffn": 768},
    ),
    "gpt-oss-20b": Shape(
        *("gpt-oss", 24, 2880, 2880, 64, 8, 201_088, 131_072, 150_000.0),
        **{"head_size": 64, "qkv_bias": True, "experts": 32, "experts_used": 4, "expert_ffn": 2880, "window": 128},
    ),
}
