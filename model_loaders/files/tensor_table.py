"""The table of a model's tensors: for each slot of a decoder, the tensors of a file whose rows fill it, in order.

The table says which tensors a file must have, their names in GGUF, and the weights of the forward pass that they fill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from polarlm.model_loaders.config import (
    Attention,
    ChannelDelta,
    Experts,
    Ffn,
    GatedDelta,
    GatedMLP,
    LatentAttention,
    Mamba2,
    Mixer,
    ModelConfig,
    Recurrent,
    ShortConv,
    is_gated,
)

# Slot → names of its tensors in a layer, without ".weight": Hugging Face's, with {} for the number of an expert, and
# llama.cpp's. Names in the slots of `_WHOLE_NAMES` are complete.
Names = Mapping[str, tuple[tuple[str, str], ...]]
OF_EXPERTS = ("experts_gate_up", "experts_down")
_OF_HEADS = ("latent_keys", "latent_values")  # a matrix of each head
_WHOLE_NAMES = (
    *("sink_scores", "choice_bias", "expert_factors", "router_norm", "layer_scale", "sum_bias"),
    *("delta_decay", "delta_dt_bias", "mamba_decay", "mamba_dt_bias", "mamba_skip"),
)
_CONVOLUTIONS = ("conv", "delta_conv", "mamba_conv")
_FLAT = ("delta_decay", "mamba_decay", "mamba_skip", "mamba_out_norm")  # two-dimensional in GGUF files
_WITHOUT_OFFSET = ("delta_out_norm",)  # norms whose weights are stored as they are


@dataclass(frozen=True)
class RowParts:
    """Rows of another tensor. The rows there are groups; each has parts of `sizes` rows, one after another.

    Of each group's parts, those numbered `parts` are taken: first the first one of every group, then the next.
    """

    source: str  # the name of the other tensor
    sizes: tuple[int, ...]
    parts: tuple[int, ...]
    gguf: str = ""  # llama.cpp's name of the other tensor, if a file may have it instead

    def rows(self, count: int) -> np.ndarray:
        """The numbers of the rows to take of a tensor that has `count`, int64."""
        groups = np.arange(count).reshape(-1, sum(self.sizes))
        ends = np.cumsum(self.sizes)
        return np.concatenate([groups[:, ends[part] - self.sizes[part] : ends[part]].ravel() for part in self.parts])


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a file.

    rotated_heads: the number of heads, from the first row on, that the RoPE of `attention` rotates; a file may order
    their rows differently. offset: a number that Hugging Face's files subtract from the values, and GGUF files do not.
    factor: a number that all files leave to be multiplied with the values. flat: files have the values in an array of
    more dimensions, the last ones of which are read as one. copy_of: the name of the tensor that stands for this
    one, which files lack; empty if they have it. negated_exp: Hugging Face's files have x of the value −exp(x).
    row_parts: how to make this tensor of a file that lacks it. is_transposed: these rows, or those of `copy_of`, are
    its columns.
    """

    name: str  # Hugging Face's
    gguf: str  # llama.cpp's
    shape: tuple[int, ...]
    rotated_heads: int = 0
    attention: Attention | None = None
    offset: float = 0.0
    factor: float = 1.0
    copy_of: str = ""
    flat: bool = False
    negated_exp: bool = False
    row_parts: RowParts | None = None
    is_transposed: bool = False

    def as_parts(self, sizes: tuple[int, ...], *parts: int, source: str = "") -> TensorSpec:
        """The spec of a tensor that consists of parts of another; see `RowParts`. source: the other one's name, if that
        is not this spec's."""
        whole = source or self.name
        return replace(self, name=f"{whole}[{','.join(map(str, parts))}]", row_parts=RowParts(whole, sizes, parts))

    def row_order(self, interleaved: bool) -> np.ndarray | None:
        """For each row of the tensor in a file, its row in memory, (rows,) int64; None if the order is the same.

        In memory, RoPE's pairs are channels D/2 apart. In a file they are rotary_dim/2 apart, or neighbours if
        `interleaved`; channels that RoPE does not rotate follow in the file, and are paired with each other in memory.
        """
        attention = self.attention
        if attention is None or not (interleaved or attention.rotary_dim):
            return None
        if isinstance(attention, LatentAttention):  # channels that are rotated follow the others, and stay together
            rows = np.arange(self.shape[0]).reshape(self.rotated_heads, -1)
            rotated = rows[:, -attention.rotated :]
            rotated[...] = rotated[:, head_order(attention.rotated, attention.rotated, interleaved)]
            return rows.ravel()
        head = head_order(attention.head_dim, attention.rotated, interleaved)
        order = np.arange(self.shape[0])
        rotary_rows = self.rotated_heads * attention.head_dim
        order[:rotary_rows] = (order[:rotary_rows].reshape(-1, attention.head_dim)[:, :1] + head).ravel()
        return order


def head_order(head_dim: int, rotary_dim: int, interleaved: bool) -> np.ndarray:
    """`TensorSpec.row_order` of one head, (D,) int64.

    >>> head_order(6, 6, interleaved=True).tolist()
    [0, 3, 1, 4, 2, 5]
    >>> head_order(8, 4, interleaved=False).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    rotary_rows, other_rows = np.arange(rotary_dim), np.arange(head_dim - rotary_dim)
    pairs, half_rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    pair, half = (rotary_rows // 2, rotary_rows % 2) if interleaved else (rotary_rows % pairs, rotary_rows // pairs)
    other_places = pairs + other_rows % max(1, half_rest) + other_rows // max(1, half_rest) * (head_dim // 2)
    return np.concatenate([pair + half * (head_dim // 2), other_places])


Slots = Mapping[str, tuple[TensorSpec, ...]]


@dataclass(frozen=True)
class TensorTable:
    """`top` has the slots embedding, norm (the last one) and, unless tied to the embedding, head; with embeddings of
    layers also layer_embedding, layer_projection and layer_projection_norm. Encoders with LayerNorms have
    embedding_norm, where sums are normed instead of norm, and positions and token_types if there are such tables. The
    products after pooling are dense_0, dense_1, …; a head that scores pairs of texts has score_dense and score, with
    score_norm between them where norms have no biases.

    A layer has attention_norm, qkv (queries, keys, values), q_norm, k_norm, sink_scores, output_gate, out,
    attention_post_norm; or, if it is latent attention, attention_norm, q_down and q_latent_norm if queries are made of
    a latent vector, q_up, kv_down, kv_norm, latent_keys, latent_key_rows and latent_values (of each head), out; or, if
    it is a short convolution, conv_norm, conv_in (B, C, x), conv, conv_out, conv_post_norm; or, if it is a gated delta
    rule, delta_norm, delta_in (queries, keys, values, z, b, a), delta_conv, delta_decay,
    delta_dt_bias, delta_out_norm, delta_out; or, if it is Mamba 2, mamba_norm, mamba_in (z, x, B, C, dt), mamba_conv,
    mamba_decay, mamba_dt_bias, mamba_skip, mamba_out_norm, mamba_out. With a network it has ffn_norm, gate_up (up alone
    if there is no gate), down, ffn_post_norm. A mixture of experts has, instead of gate_up and down, router,
    choice_bias, experts_gate_up and experts_down (all tensors of the first expert, then all tensors of the next),
    expert_factors, sum_bias, shared_gate, shared_gate_up, shared_down, and latent_in and latent_out around the experts
    if they have inputs of another size; and with norms of their own router_norm, experts_norm, experts_post_norm,
    shared_post_norm. A scaled layer has layer_scale, and one with an embedding layer_gate, layer_out, layer_post_norm.
    The layer of `ModelConfig.mtp` has mtp_embedding_norm, mtp_hidden_norm, mtp_in (for an embedding and a hidden state,
    side by side) and mtp_norm; the first one of an assistant head_logits and head_out, too. Where channels of a
    delta rule decay by themselves, delta_in has queries, keys, values and b, and there are delta_decay_down and
    delta_decay_up, delta_gate_down and delta_gate_up. Biases are in slots with names that end with "_bias", such
    as qkv_bias. A slot that a model lacks is absent.
    """

    top: Slots
    layers: tuple[Slots, ...]

    def specs(self) -> Iterator[TensorSpec]:
        """Every tensor once."""
        for slots in (self.top, *self.layers):
            for specs in slots.values():
                yield from specs


def tensor_table(
    config: ModelConfig,
    names: Names,
    norm_offset: float = 0.0,
    last_norm: tuple[str, str] = ("model.norm", "output_norm"),
) -> TensorTable:
    """The table of a decoder whose layers have the slots of `names`, and biases as `config` says.

    A slot lists its tensors in the order of TensorTable; a fused tensor may fill it alone. norm_offset: `offset` of the
    weights of norms. last_norm: names of the norm before the head.
    """
    e = config.hidden_size
    top = slots_of("embedding", "model.embed_tokens", "token_embd", (config.vocab_size, e))
    if config.norms_inputs:
        has_bias = not config.centred
        top |= slots_of("embedding_norm", "model.embedding_norm", "token_embd_norm", (e,), has_bias=has_bias)
        if config.positions:
            top |= slots_of("positions", "model.positions", "position_embd", (config.positions, e))
        if config.token_types:
            top |= slots_of("token_types", "model.token_types", "token_types", (config.token_types, e))
    if config.layers[0].norms != "sums":
        top["norm"] = (TensorSpec(f"{last_norm[0]}.weight", f"{last_norm[1]}.weight", (e,), offset=norm_offset),)
    for number, dense in enumerate(config.dense):
        ggml = f"dense_{number + 2}"  # llama.cpp counts the modules before them
        shape = dense.outputs, dense.inputs
        top |= slots_of(f"dense_{number}", f"model.dense.{number}", ggml, shape, has_bias=dense.bias)
    if config.scores_pairs:
        top |= slots_of("score_dense", "model.score_dense", "cls", (e, e), has_bias=not config.centred)
        if config.centred:
            top |= slots_of("score_norm", "model.score_norm", "cls.norm", (e,))
        top |= slots_of("score", "model.score", "cls.output", (1, e), has_bias=True)
    if not config.tied_head:
        top |= slots_of("head", "lm_head", "output", (config.vocab_size, e))
    return TensorTable(top, tuple(_layer(config, names, norm_offset, layer) for layer in range(len(config.layers))))


def slots_of(
    slot: str, theirs: str, ggml: str, shape: tuple[int, ...], *, has_bias: bool = False, flat: bool = False
) -> dict[str, tuple[TensorSpec, ...]]:
    """The slots of a tensor and its bias, by Hugging Face's and llama.cpp's names without ".weight"."""
    weight = TensorSpec(f"{theirs}.weight", f"{ggml}.weight", shape, flat=flat)
    slots: dict[str, tuple[TensorSpec, ...]] = {slot: (weight,)}
    if has_bias:
        slots[f"{slot}_bias"] = (TensorSpec(f"{theirs}.bias", f"{ggml}.bias", shape[:1]),)
    return slots


def unused_names(config: ModelConfig) -> set[str]:
    """Names of tensors that files may have and a model does not need: of layers that share the K/V of another, and
    copies of embedding and head in the layer of `ModelConfig.mtp`."""
    theirs = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm", "self_attn.v_norm")
    names = (*theirs, "attn_k", "attn_v", "attn_k_norm")
    shared = config.attentions.keys() - config.kv_attentions.keys()
    copies = {f"model.layers.{config.depth}.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    return copies | {f"model.layers.{layer}.{name}.weight" for layer in shared for name in names}


def _layer(config: ModelConfig, names: Names, norm_offset: float, layer: int) -> Slots:
    mixer, ffn = config.layers[layer].mixer, config.layers[layer].ffn
    attention = mixer if isinstance(mixer, Attention) else None
    shapes, biased = _layer_shapes(config, layer)
    slots: dict[str, tuple[TensorSpec, ...]] = {}
    for slot, tensors in names.items():
        if slot not in shapes:
            continue
        expert_numbers = range(ffn.count) if isinstance(ffn, Experts) and slot in OF_EXPERTS else (None,)
        if isinstance(mixer, LatentAttention) and slot in _OF_HEADS:
            expert_numbers = range(mixer.heads)
        kinds = ("",) if slot in _WHOLE_NAMES else (".weight", ".bias") if slot in biased else (".weight",)
        parts = shapes[slot]
        if len(tensors) == 1 and len(parts) > 1:  # a fused tensor
            parts = [((sum(shape[0] for shape, _ in parts), *parts[0][0][1:]), sum(heads for _, heads in parts))]
        tensors = tensors[: len(parts)]  # without keys and values where a layer shares them
        # The values are a copy of the keys.
        is_copy = slot == "qkv" and attention is not None and attention.values_are_keys and not attention.shares_kv
        for kind in kinds:
            slots[f"{slot}_bias" if kind == ".bias" else slot] = tuple(
                TensorSpec(
                    f"model.layers.{layer}.{theirs.format(expert)}{kind}",
                    f"blk.{layer}.{ggml}{kind}" + ("" if expert is None else f"[{expert}]"),
                    shape if kind != ".bias" else (_channels(mixer),) if slot in _CONVOLUTIONS else shape[:1],
                    heads,
                    attention if heads else None,
                    norm_offset if slot.endswith("norm") and slot not in _WITHOUT_OFFSET else 0.0,
                    config.hidden_size**-0.5 if slot == "router_norm" else 1.0,
                    f"model.layers.{layer}.{tensors[1][0]}{kind}" if is_copy and theirs == tensors[-1][0] else "",
                    flat=(slot in _CONVOLUTIONS and kind == ".weight") or slot in _FLAT,
                    negated_exp=slot in ("delta_decay", "mamba_decay"),
                )
                for expert in expert_numbers
                for (theirs, ggml), (shape, heads) in zip(tensors, parts, strict=True)
            )
    return slots


_Shape = tuple[tuple[int, ...], int]  # a tensor's shape, and how many of its heads are rotated
_Shapes = dict[str, list[_Shape]]  # by slot


def _layer_shapes(config: ModelConfig, layer: int) -> tuple[_Shapes, set[str]]:
    """The shapes of a layer's tensors, and the slots that have biases."""
    e, inputs = config.hidden_size, config.layer_embedding
    mixer, ffn, norms = config.layers[layer].mixer, config.layers[layer].ffn, config.layers[layer].norms
    shapes, biased = _mixer_shapes(e, mixer)
    if ffn is not None:
        ffn_shapes, more = _ffn_shapes(e, ffn)
        shapes, biased = {**shapes, **ffn_shapes, "ffn_norm": _one(e), "ffn_post_norm": _one(e)}, biased | more
    if norms == "sums":
        biased |= {"attention_post_norm", "ffn_post_norm"}
    if inputs:
        shapes |= {"layer_gate": _one(inputs, e), "layer_out": _one(e, inputs), "layer_post_norm": _one(e)}
    if config.layers[layer].scaled:
        shapes["layer_scale"] = _one(1)
    if layer == config.depth:
        shapes |= {f"mtp_{name}": _one(e) for name in ("embedding_norm", "hidden_norm", "norm")}
        shapes["mtp_in"] = _one(e, 2 * e)
    return shapes, biased


def _mixer_shapes(e: int, mixer: Mixer) -> tuple[_Shapes, set[str]]:
    if isinstance(mixer, ShortConv):
        shapes = {"conv_in": _one(3 * e, e), "conv": _one(e * mixer.width), "conv_out": _one(e, e)}
        return {"conv_norm": _one(e), "conv_post_norm": _one(e), **shapes}, set(shapes) if mixer.bias else set()
    if isinstance(mixer, GatedDelta | ChannelDelta):
        keys, values, heads = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim, mixer.value_heads
        shapes = {"delta_norm": _one(e), "delta_out_norm": _one(mixer.value_dim), "delta_out": _one(e, values)}
        convolved, others, rates = [mixer.channels], [values, heads, heads], heads
        if isinstance(mixer, ChannelDelta):
            convolved, others, rates = [keys, keys, values], [heads], keys
            for name, out in (("decay", keys), ("gate", values)):
                shapes |= {f"delta_{name}_down": _one(mixer.rank, e), f"delta_{name}_up": _one(out, mixer.rank)}
        return {
            "delta_in": [((rows, e), 0) for rows in (*convolved, *others)],
            "delta_conv": [((rows * mixer.width,), 0) for rows in convolved],
            "delta_decay": _one(heads),
            "delta_dt_bias": _one(rates),
            **shapes,
        }, set()
    if isinstance(mixer, Mamba2):
        inner, head_vector = mixer.value_heads * mixer.value_dim, _one(mixer.value_heads)
        return {
            "mamba_norm": _one(e),
            "mamba_in": _one(inner + mixer.channels + mixer.value_heads, e),
            "mamba_conv": _one(mixer.channels * mixer.width),
            **dict.fromkeys(("mamba_decay", "mamba_dt_bias", "mamba_skip"), head_vector),
            "mamba_out_norm": _one(inner),
            "mamba_out": _one(e, inner),
        }, {"mamba_conv"} if mixer.conv_bias else set()
    assert isinstance(mixer, Attention)
    return _latent_shapes(e, mixer) if isinstance(mixer, LatentAttention) else _attention_shapes(e, mixer)


def _channels(mixer: Mixer) -> int:
    assert isinstance(mixer, Recurrent | ShortConv)
    return mixer.channels


def _attention_shapes(e: int, mixer: Attention) -> tuple[_Shapes, set[str]]:
    d, h, k = mixer.head_dim, mixer.heads, mixer.kv_heads
    separate: list[_Shape] = [((h * d, e), h), ((k * d, e), k), ((k * d, e), 0)]
    shapes: _Shapes = {
        "qkv": separate[:1] if mixer.shares_kv else separate,
        "out": _one(e, h * d),
        **dict.fromkeys(("attention_norm", "attention_post_norm"), _one(e)),
    }
    if mixer.output_gate:
        shapes["output_gate"] = _one(h if mixer.gate_by_head else h * d, e)
    if mixer.qk_norm in ("head", "all", "after_rope"):
        for slot, number in (("q_norm", h), ("k_norm", k)):
            number = number if mixer.qk_norm == "all" else 1
            shapes[slot] = [((number * d,), number)]
        if mixer.shares_kv:
            del shapes["k_norm"]
    if mixer.sink_scores:
        shapes["sink_scores"] = _one(h)
    biased = {slot for slot, has_bias in (("qkv", mixer.qkv_bias), ("out", mixer.out_bias)) if has_bias}
    return shapes, biased


def _latent_shapes(e: int, mixer: LatentAttention) -> tuple[_Shapes, set[str]]:
    h, inputs = mixer.heads, mixer.query_latent or e
    shapes: _Shapes = {
        "q_up": [((h * (mixer.own_dim + mixer.rotated), inputs), h)],
        "kv_down": [((mixer.head_dim, e), 1)],
        "kv_norm": _one(mixer.latent),
        "latent_keys": _one(mixer.latent, mixer.own_dim),
        "latent_values": _one(mixer.value_dim, mixer.latent),
        "out": _one(e, h * mixer.value_dim),
        **dict.fromkeys(("attention_norm", "attention_post_norm"), _one(e)),
    }
    if mixer.query_latent:
        shapes |= {"q_down": _one(inputs, e), "q_latent_norm": _one(inputs)}
    biased = {"q_down", "kv_down"} & shapes.keys() if mixer.qkv_bias else set()
    return shapes, biased | ({"out"} if mixer.out_bias else set())


def _ffn_shapes(e: int, ffn: Ffn) -> tuple[_Shapes, set[str]]:
    inputs = ffn.latent or e if isinstance(ffn, Experts) else e
    up = _one(ffn.size, inputs) * (2 if is_gated(ffn.activation) else 1)  # after the gate
    if isinstance(ffn, GatedMLP):
        return {"gate_up": up, "down": _one(e, ffn.size)}, {"gate_up", "down"} if ffn.bias else set()
    shapes: _Shapes = {"router": _one(ffn.count, e), "experts_gate_up": up, "experts_down": _one(inputs, ffn.size)}
    biased = {"experts_gate_up", "experts_down"} if ffn.bias else set()
    if ffn.router_bias:
        biased.add("router")
    if ffn.choice_bias:
        shapes["choice_bias"] = _one(ffn.count)
    if ffn.latent:
        shapes |= {"latent_in": _one(inputs, e), "latent_out": _one(e, inputs)}
    if ffn.sum_bias:
        shapes["sum_bias"] = _one(e)
    if ffn.factors:
        shapes["expert_factors"] = _one(ffn.count)
    if ffn.own_norms:
        norms = ("router_norm", "experts_norm", "experts_post_norm", "shared_post_norm")
        shapes |= dict.fromkeys(norms, _one(e))
    if ffn.shared is not None:
        shared_shapes, with_bias = _ffn_shapes(e, ffn.shared)
        shapes |= {f"shared_{slot}": shape for slot, shape in shared_shapes.items()}
        biased |= {f"shared_{slot}" for slot in with_bias}
    if ffn.shared_gate:
        shapes["shared_gate"] = _one(1, e)
    return shapes, biased


def _one(*shape: int) -> list[_Shape]:
    return [(shape, 0)]
