"""The configuration of a model, independent of its file format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

# swiglu_clamped: with g = min(gate, 7), g · σ(1.702 g) · (clip(up, −7, 7) + 1).
# gated_gelu: gate · Φ(gate) · up, and gelu_tanh, the same by tanh. relu_squared: relu(up)², gelu: up · Φ(up), and
# plain_gelu_tanh, the same by tanh, of networks without a gate.
Activation = Literal["silu", "gelu_tanh", "gated_gelu", "swiglu_clamped", "relu_squared", "gelu", "plain_gelu_tanh"]
# RMSNorm of q and k before RoPE: of each head, with weights (D,) or without; or of all heads, with weights (H·D,) and
# (K·D,). Or after it, of each head with weights (D,).
QKNorm = Literal["head", "unweighted", "all", "after_rope"] | None
# RMSNorm of the inputs of mixer and ffn, of their outputs, or of both; or LayerNorm of the sums of input and output.
Norms = Literal["before", "after", "both", "sums"]
MOST_EXPERTS = 4096  # of a layer, whose scores and counters kernels keep in a thread's memory


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
    attention_factor: float | None = None  # yarn, longrope: multiplies cos and sin; None: derived from `factor`
    mscale: float = 0.0  # yarn: the two terms that some configs derive the attention factor from
    mscale_all_dim: float = 0.0
    truncate: bool = True  # yarn: round the correction range to whole channels
    divisors: tuple[float, ...] = ()  # any kind: one per channel pair, as GGUF files of Llama 3.1 store them
    short_divisors: tuple[float, ...] = field(default=(), repr=False)  # longrope: within the original context
    # Pairs of channels that turn by the position in time, in height and in width; empty: all by the same one. They
    # follow each other, or take turns: time, height, width, as long as there are any, and the rest by time.
    sections: tuple[int, int, int] | tuple[()] = ()
    sections_take_turns: bool = False

    def for_context(self, tokens: int) -> RopeConfig:
        """RoPE for a context of `tokens`: within the original context, longrope takes the short divisors."""
        is_short = 0 < tokens <= self.original_context and self.short_divisors
        return replace(self, divisors=self.short_divisors) if is_short else self


class Mixer:
    """The part of a layer in which tokens see each other; each kind is a subclass."""


@dataclass(frozen=True)
class Attention(Mixer):
    """Attention over keys and values: the mixer of a layer."""

    heads: int  # H
    kv_heads: int  # K, divides H
    head_dim: int  # D, not necessarily E / H
    rope: RopeConfig | None  # None: no RoPE
    rotary_dim: int | None = None  # channels of a head that RoPE rotates; None: D
    # Attend to this many last tokens (itself included); None: all. If not causal, to those up to window // 2 away.
    window: int | None = None
    scale: float | None = None  # factor of q·k; None: D^-½
    softcap: float | None = None  # c: scores s become c · tanh(s / c)
    sink_scores: bool = False  # each query head has one more score, a weight, whose value is 0
    # (b, n): queries of position p are multiplied by 1 + b · ln(1 + ⌊p / n⌋), in all layers alike; they have no norm
    query_growth: tuple[float, int] | None = None
    qk_norm: QKNorm = None
    v_norm: bool = False  # RMSNorm of each value, without weights
    values_are_keys: bool = False  # values are keys before RoPE and norm: there is no projection of values
    shares_kv: bool = False  # reads the K/V of the nearest earlier layer with this window and these heads
    output_gate: bool = False  # the result is multiplied by σ of a projection of the input
    gate_by_head: bool = False  # this gate has one number for a head, not one for each of its channels
    qkv_bias: bool = False
    out_bias: bool = False
    is_causal: bool = True  # otherwise a token sees the later ones as well, and no keys and values are kept
    images_whole: bool = False  # rows of an image see its later rows, too

    @property
    def score_scale(self) -> float:
        """The factor of q·k."""
        return self.scale or self.head_dim**-0.5

    @property
    def rope_kind(self) -> tuple[RopeConfig | None, int, int]:
        """What determines cos and sin: layers for which it is equal share their tables."""
        return self.rope, self.rotated, self.head_dim

    @property
    def rotated(self) -> int:
        """Channels of a head that RoPE rotates."""
        return self.rotary_dim or self.head_dim


@dataclass(frozen=True)
class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, §2.1): all heads share one key and one value a token.

    The key has `head_dim` channels: a latent vector, which is the value as well, and `rotary_dim` channels that RoPE
    rotates. A query of `own_dim` channels of its own and `rotary_dim` others is multiplied into the latent space, and a
    result back out of it, to `value_dim` channels.
    """

    own_dim: int = 0
    value_dim: int = 0
    query_latent: int = 0  # size of a latent vector that queries are made of; 0: of the layer's input

    @property
    def latent(self) -> int:
        """Channels of the latent vector: L."""
        return self.head_dim - self.rotated


@dataclass(frozen=True)
class ShortConv(Mixer):
    """C · conv(B · x) of three projections B, C and x of the input; conv is causal, of each channel alone."""

    channels: int  # E
    width: int  # tokens that the convolution sees, the newest included
    bias: bool = False  # in the projections and the convolution


@dataclass(frozen=True)
class Recurrent(Mixer):
    """A mixer with a matrix for each value head, which tokens change and read.

    Queries, keys and values are sums over the last `width` tokens, channel by channel.
    """

    key_heads: int  # also of queries
    value_heads: int  # a multiple of key_heads
    key_dim: int
    value_dim: int
    width: int
    tiled: bool = False  # value head i has the key of head i mod key_heads; otherwise neighbours share a key

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class GatedDelta(Recurrent):
    """A gated delta rule: a head's matrix decays and, where a token's key reads it, gets new values."""


@dataclass(frozen=True)
class ChannelDelta(Recurrent):
    """A gated delta rule in which each channel of a head's keys decays by itself: Kimi Delta Attention (Kimi Linear,
    arXiv:2510.26692, §3). Every head has a key of its own."""

    rank: int = 0  # size of the vectors that decays, and gates of results, are made of


@dataclass(frozen=True)
class Mamba2(Recurrent):
    """Mamba 2: a head's matrix decays, and the product of a token's key and value is added to it.

    Its key heads are called groups, its key dim the state size; its keys, queries and values are B, C and x.
    """

    norm_eps: float = 1e-5  # for the norm of its results
    conv_bias: bool = True


def is_gated(activation: str) -> bool:
    """Whether networks with this activation have a gate. Without one they compute down(activation(up(x)))."""
    return activation not in ("relu_squared", "gelu", "plain_gelu_tanh")


@dataclass(frozen=True)
class GatedMLP:
    """down(activation(gate(x)) · up(x)): the feed-forward network of a layer; see `is_gated`."""

    size: int  # F
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: each token has a weighted sum of the results of `top_k` of `count` gated networks.

    The router's logits become scores; the experts with the largest scores are chosen, and weigh by their scores. With
    groups, the best ones of these are chosen first, by their experts' largest score, or, of sigmoid scores, by the sum
    of the two largest.
    """

    count: int
    top_k: int
    size: int  # F of one expert
    activation: Activation = "silu"
    bias: bool = False  # in the experts' matrices
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False  # the weights of a token are divided by their sum
    scale: float = 1.0  # factor of the weights
    router_bias: bool = False  # added to the router's logits
    choice_bias: bool = False  # a number for each expert is added to the scores that it is chosen by, not to its weight
    shared: GatedMLP | None = None  # computed for every token, and added
    shared_gate: bool = False  # the shared network's result is multiplied by σ of a product with the input
    factors: bool = False  # the weight of each expert is multiplied by a number of its own
    sum_bias: bool = False  # in encoders: a bias is added to the sum of the experts' results
    own_norms: bool = False  # router, experts and shared network have norms of their own, and so have their results
    groups: int = 1  # of neighbouring experts, as many in each
    top_groups: int = 1  # how many groups experts are chosen from
    latent: int = 0  # size of the experts' inputs and results, with a product before and one after them; 0: E

    @property
    def best_of_group(self) -> int:
        """How many of a group's largest scores are the group's, together."""
        return 2 if self.scoring == "sigmoid" else 1


Ffn = GatedMLP | Experts


@dataclass(frozen=True)
class Layer:
    """A decoder layer adds to the residual stream the output of its mixer, then of its feed-forward network."""

    mixer: Mixer
    ffn: Ffn | None
    norms: Norms = "before"
    scaled: bool = False  # the residual stream is multiplied by a weight at the end
    parallel: bool = False  # the network reads what the mixer reads, by the same norm, and not the mixer's result


@dataclass(frozen=True)
class Dense:
    """A product that changes the vector of a text x: weight · x + bias, or its tanh."""

    inputs: int
    outputs: int
    bias: bool = False
    tanh: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A decoder or an encoder: its layers, and what they have in common.

    Letters used everywhere: E hidden size, F feed-forward size, H query heads, K KV heads, D head dim, L layers,
    V vocabulary size.
    """

    family: str  # the file in model_loaders/families that configured it
    layers: tuple[Layer, ...]  # L
    hidden_size: int  # E
    vocab_size: int  # V: rows of the embedding
    max_context: int  # tokens
    norm_eps: float
    post_norm_eps: float | None = None  # for norms after a mixer or network; None: norm_eps
    centred: bool = False  # norms of the residual stream subtract its mean: they are LayerNorms without biases
    tied_head: bool = False  # the output head is the embedding
    embedding_scale: float = 1.0  # factor of embeddings, not of the head
    rounded_scale: bool = False  # `embedding_scale` is rounded to the type of the embeddings in the file
    embedding_norm: bool = False  # RMSNorm of embeddings, without weights
    logit_scale: float = 1.0  # factor of logits, before their soft cap
    layer_embedding: int = 0  # P: numbers of the input that each layer has of each token; 0: none
    logit_softcap: float | None = None  # c: logits l become c · tanh(l / c)
    positions: int = 0  # rows of a table of positions, which are added to embeddings; 0: there is none
    first_position: int = 0  # the row of the first token
    token_types: int = 0  # rows of a table of types of tokens: of a text, or of the first of a pair, the first is added
    dense: tuple[Dense, ...] = ()  # applied to pooled states, one after another
    scores_pairs: bool = False  # a head gives a pair of texts a number, how relevant the second is for the first
    pooled_pairs: bool = False  # it reads the mean of the pair's states, not the first one
    mtp: bool = False  # the last of `layers` is no part of the model: it guesses the token after the next one
    eagle3: Eagle3Head | None = None  # what that layer belongs to, if not to the model's own files
    assistant: ModelConfig | None = None  # an assistant, whose layers are the last ones and no part of the model

    @property
    def depth(self) -> int:
        """The layers of the model itself."""
        return len(self.layers) - (self.mtp if self.assistant is None else len(self.assistant.layers))

    @property
    def is_encoder(self) -> bool:
        """Whether its tokens see later ones, so that it gives texts a vector and generates none."""
        return any(not attention.is_causal for attention in self.attentions.values())

    @property
    def norms_inputs(self) -> bool:
        """Whether a norm with weights follows the embeddings, as in encoders whose norms are LayerNorms."""
        return self.is_encoder and (self.centred or self.layers[0].norms == "sums")

    @property
    def has_sections(self) -> bool:
        """Whether RoPE turns some channels by the height and the width of a token's place in an image."""
        return any(one.rope is not None and one.rope.sections for one in self.attentions.values())

    @property
    def vector_size(self) -> int:
        """The numbers of a text's vector."""
        return self.dense[-1].outputs if self.dense else self.hidden_size

    @property
    def attentions(self) -> dict[int, Attention]:
        """Layer number → attention, for each layer that has attention."""
        return {i: layer.mixer for i, layer in enumerate(self.layers) if isinstance(layer.mixer, Attention)}

    @property
    def kv_attentions(self) -> dict[int, Attention]:
        """Layer number → attention, for each layer that has K/V of its own."""
        return {number: mixer for number, mixer in self.attentions.items() if mixer.is_causal and not mixer.shares_kv}

    @property
    def attention(self) -> Attention:
        """The attention of the first layer that has it, for figures that describe a whole model."""
        return next(iter(self.attentions.values()))

    @property
    def ffn(self) -> Ffn:
        """The feed-forward network of the first layer that has one, for figures that describe a whole model."""
        return next(layer.ffn for layer in self.layers if layer.ffn is not None)

    def with_attention(self, change: Callable[[Attention], Attention]) -> ModelConfig:
        """The configuration with `change` applied to each layer's attention."""
        attentions = self.attentions
        layers = (
            replace(layer, mixer=change(attentions[number])) if number in attentions else layer
            for number, layer in enumerate(self.layers)
        )
        return replace(self, layers=tuple(layers))

    def with_mtp(self) -> ModelConfig:
        """The configuration with the layer that guesses the token after the next one: as the last with attention, of
        those with a network if there are any."""
        last = max(self.attentions, key=lambda number: (self.layers[number].ffn is not None, number))
        return replace(self, layers=(*self.layers, self.layers[last]), mtp=True)

    def for_context(self, tokens: int) -> ModelConfig:
        """The configuration for a context of `tokens`."""
        return self.with_attention(lambda mixer: replace(mixer, rope=mixer.rope and mixer.rope.for_context(tokens)))


@dataclass(frozen=True)
class Eagle3Head:
    """A draft head of another file, which reads hidden states of some of a model's layers (arXiv:2503.01840)."""

    model: ModelConfig  # its layer, sizes, and rows of its output head
    layers: tuple[int, ...]  # numbers of the model's layers: the hidden states before them, or after the last one
    ids: tuple[int, ...] = ()  # the model's id of each row of its output head; empty if they are the same
    residual_normed: bool = False  # the residual stream begins with hidden states after their norm
    has_embedding: bool = False  # it reads its own embedding, not the model's


@dataclass(frozen=True)
class GenerationDefaults:
    """How a model's files want it sampled."""

    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams that the files name → values
    greedy: bool = False  # the file says do_sample: false
    max_tokens: int = -1  # most tokens of an answer; -1: no limit
    banned: tuple[int, ...] = ()  # tokens that the model must not write
    banned_first: tuple[int, ...] = ()  # tokens that must not be the first of an answer
    banned_sequences: tuple[tuple[int, ...], ...] = ()  # sequences of two tokens or more that must not occur
