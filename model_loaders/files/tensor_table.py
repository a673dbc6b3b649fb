"""The table of a model's tensors: for each slot of a decoder, the tensors of a file whose rows fill it, in order.

The table says which tensors a file must have, their names in GGUF, and the weights of the forward pass that they fill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.model_loaders.config import Attention, GatedMLP, ModelConfig

# Slot → names of its tensors in a layer, without ".weight": Hugging Face's and llama.cpp's.
Names = Mapping[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a file.

    rotated_heads: the number of heads, from the first row on, that the RoPE of `attention` rotates; a file may order
    their rows differently. offset: a number that Hugging Face's files subtract from the values, and GGUF files do not.
    """

    name: str  # Hugging Face's
    gguf: str  # llama.cpp's
    shape: tuple[int, ...]
    rotated_heads: int = 0
    attention: Attention | None = None
    offset: float = 0.0


Slots = Mapping[str, tuple[TensorSpec, ...]]


@dataclass(frozen=True)
class TensorTable:
    """`top` has the slots embedding, norm (the last one) and, unless tied to the embedding, head.

    A layer has attention_norm, qkv (queries, keys, values), q_norm, k_norm, out, attention_post_norm, ffn_norm,
    gate_up, down, ffn_post_norm; qkv_bias, out_bias, gate_up_bias, down_bias. A slot that a model lacks is absent.
    """

    top: Slots
    layers: tuple[Slots, ...]

    def specs(self) -> Iterator[TensorSpec]:
        """Every tensor once."""
        for slots in (self.top, *self.layers):
            for specs in slots.values():
                yield from specs


def tensor_table(config: ModelConfig, names: Names, norm_offset: float = 0.0) -> TensorTable:
    """The table of a decoder whose layers have the slots of `names`, and biases as `config` says.

    A slot lists its tensors in the order of TensorTable; a fused tensor may fill it alone. norm_offset: `offset` of the
    weights of norms.
    """
    e = config.hidden_size
    top = {
        "embedding": (TensorSpec("model.embed_tokens.weight", "token_embd.weight", (config.vocab_size, e)),),
        "norm": (TensorSpec("model.norm.weight", "output_norm.weight", (e,), offset=norm_offset),),
    }
    if not config.tied_head:
        top["head"] = (TensorSpec("lm_head.weight", "output.weight", (config.vocab_size, e)),)
    return TensorTable(top, tuple(_layer(config, names, norm_offset, layer) for layer in range(len(config.layers))))


def _layer(config: ModelConfig, names: Names, norm_offset: float, layer: int) -> Slots:
    slots: dict[str, tuple[TensorSpec, ...]] = {}
    mixer, ffn = config.layers[layer].mixer, config.layers[layer].ffn
    assert isinstance(mixer, Attention)
    biased = {"qkv": mixer.qkv_bias, "out": mixer.out_bias, "gate_up": ffn.bias, "down": ffn.bias}
    for slot, tensors in names.items():
        shapes = _shapes(config.hidden_size, mixer, ffn, slot, len(tensors))
        for kind in ("weight", "bias") if biased.get(slot) else ("weight",):
            slots[slot if kind == "weight" else f"{slot}_bias"] = tuple(
                TensorSpec(
                    f"model.layers.{layer}.{theirs}.{kind}",
                    f"blk.{layer}.{ggml}.{kind}",
                    shape if kind == "weight" else shape[:1],
                    heads,
                    mixer if heads else None,
                    norm_offset if slot.endswith("norm") else 0.0,
                )
                for (theirs, ggml), (shape, heads) in zip(tensors, shapes, strict=True)
            )
    return slots


def _shapes(e: int, mixer: Attention, ffn: GatedMLP, slot: str, count: int) -> list[tuple[tuple[int, ...], int]]:
    """(shape, rotated heads) of each of the `count` tensors of a slot; e: hidden size."""
    f, d, h, k = ffn.size, mixer.head_dim, mixer.heads, mixer.kv_heads
    if slot == "qkv":
        heads = ((h, h), (k, k), (k, 0)) if count == 3 else ((h + 2 * k, h + k),)
        return [((number * d, e), rotated) for number, rotated in heads]
    if slot == "gate_up":
        return [((2 * f // count, e), 0)] * count
    if slot in ("q_norm", "k_norm"):
        number = 1 if mixer.qk_norm == "head" else h if slot == "q_norm" else k
        return [((number * d,), number)]
    return [({"out": (e, h * d), "down": (e, f)}.get(slot, (e,)), 0)]


def row_order(spec: TensorSpec, interleaved: bool) -> np.ndarray | None:
    """For each row of a tensor in a file, its row in memory, (rows,) int64; None if the order is the same.

    In memory, RoPE's pairs are channels D/2 apart. In a file they are rotary_dim/2 apart, or neighbours if
    `interleaved`; channels that RoPE does not rotate follow in the file, and are paired with each other in memory.
    """
    attention = spec.attention
    if attention is None or not (interleaved or attention.rotary_dim):
        return None
    head = head_order(attention.head_dim, attention.rotated, interleaved)
    order = np.arange(spec.shape[0])
    rotated = spec.rotated_heads * attention.head_dim
    order[:rotated] = (order[:rotated].reshape(-1, attention.head_dim)[:, :1] + head).ravel()
    return order


def head_order(head_dim: int, rotary_dim: int, interleaved: bool) -> np.ndarray:
    """`row_order` of one head, (D,) int64.

    >>> head_order(6, 6, interleaved=True).tolist()
    [0, 3, 1, 4, 2, 5]
    >>> head_order(8, 4, interleaved=False).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    rotated, passed = np.arange(rotary_dim), np.arange(head_dim - rotary_dim)
    pairs, left = rotary_dim // 2, (head_dim - rotary_dim) // 2
    pair, half = (rotated // 2, rotated % 2) if interleaved else (rotated % pairs, rotated // pairs)
    after = pairs + passed % max(1, left) + passed // max(1, left) * (head_dim // 2)
    return np.concatenate([pair + half * (head_dim // 2), after])
