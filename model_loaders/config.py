"""The configuration of a model, independent of its file format."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding in the half-split form: it rotates channel j with channel j + D/2.

    `kind` is one of "default", "linear", "llama3", "yarn", "longrope"; the other fields are read only by the kinds that
    have them.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0  # linear, llama3, yarn, longrope: context over trained context
    original_context: int = 0  # llama3, yarn, longrope: the first trained context, in tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: multiplies cos and sin; derived from `factor` when None
    mscale: float = 0.0  # yarn: the two terms that some configs derive the attention factor from
    mscale_all_dim: float = 0.0
    truncate: bool = True  # yarn: round the correction range to whole channels
    divisors: tuple[float, ...] = ()  # any kind: one per channel pair, as GGUF files of Llama 3.1 store them
    short_divisors: tuple[float, ...] = field(default=(), repr=False)  # longrope: within the original context

    def for_context(self, tokens: int) -> RopeConfig:
        """RoPE for a context of `tokens`: within its original context, longrope takes the short divisors."""
        is_short = 0 < tokens <= self.original_context and self.short_divisors
        return replace(self, divisors=self.short_divisors) if is_short else self


@dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of a decoder.

    Letters used everywhere: E hidden size, F feed-forward size, H query heads, K KV heads, D head dim, L layers,
    V vocabulary size.
    """

    family: str  # the file in model_loaders/families that configured it
    layers: int  # L
    hidden_size: int  # E
    ffn_size: int  # F
    heads: int  # H
    kv_heads: int  # K, divides H
    head_dim: int  # D, not necessarily E / H
    vocab_size: int  # V: rows of the embedding
    max_context: int  # tokens
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    out_bias: bool = False  # o_proj
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over D on q and k, before RoPE
    tied_head: bool = False  # the output head is the embedding
    windows: tuple[int | None, ...] = ()  # per layer: attend to this many last tokens (itself included); None: all
    # Not in `repr`, which identifies a model; `engine.model.weights.fingerprint` adds those that are not defaults.
    wide_qk_norm: bool = field(default=False, repr=False)  # qk_norm is over all heads together, weights (H·D), (K·D)
    pre_norms: bool = field(default=True, repr=False)  # RMSNorm of the inputs of attention and feed-forward
    post_norms: bool = field(default=False, repr=False)  # RMSNorm of their outputs, before the residual is added
    activation: Activation = field(default="silu", repr=False)
    embedding_scale: float = field(default=1.0, repr=False)  # of embeddings, not of the head
    attention_scale: float | None = field(default=None, repr=False)  # of q·k; None: D^-½
    rotary_dim: int | None = field(default=None, repr=False)  # channels of a head that RoPE rotates; None: D
    ropes: tuple[RopeConfig | None, ...] = field(default=(), repr=False)  # per layer, None: no RoPE; empty: `rope`

    def window(self, layer: int) -> int | None:
        """Sliding window of `layer` in tokens, None if it has none."""
        return self.windows[layer] if self.windows else None

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """RoPE of `layer`, None if it has none."""
        return self.ropes[layer] if self.ropes else self.rope

    def for_context(self, tokens: int) -> ModelConfig:
        """The configuration for a context of `tokens`."""
        ropes = tuple(rope and rope.for_context(tokens) for rope in self.ropes)
        return replace(self, rope=self.rope.for_context(tokens), ropes=ropes)


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults from a model's generation_config; None for a key that it lacks.

    Those files know no DRY: it is for the demonstration model.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: tuple[str, ...] | None = None
    greedy: bool = False  # the file says do_sample: false
