"""nomic-embed-text v2, which transformers does not read: its states against a reference in float64, written from the
description of its layers, in NumPy and in compiled kernels."""

from __future__ import annotations

import json
from math import erf
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from polarlm.engine import Engine
from polarlm.model_loaders import LoadError, load_weights
from tests.encoders import make_gguf, pooled, tokenizer_json
from tests.model.test_encoder import BACKENDS, read_encoder

E, F, HEADS, LAYERS, EXPERTS, BASE, EPS = 64, 80, 4, 4, 5, 500.0, 1e-5
CONFIG = {  # the keys of the published file, and its values where they say what a layer computes
    **{"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "gelu"},
    **{"n_embd": E, "n_inner": F, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 64, "vocab_size": 96},
    **{"num_experts": EXPERTS, "moe_top_k": 2, "moe_every_n_layers": 2, "moe_normalize_expert_weights": False},
    **{"qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "prenorm": False, "type_vocab_size": 1},
    **{"rotary_emb_base": BASE, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False},
    **{"layer_norm_epsilon": EPS, "max_trained_positions": 2048, "expert_choice_router": False},
}
Tensors = dict[str, np.ndarray]


def random_tensors(rng: np.random.Generator, *, sum_bias: float) -> Tensors:
    """By the published names: the matrices of all experts of a layer are one, and the second one is not transposed."""
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (96, E)}
    shapes |= {"embeddings.token_type_embeddings.weight": (1, E), "emb_ln.weight": (E,), "emb_ln.bias": (E,)}
    for number in range(LAYERS):
        layer: dict[str, tuple[int, ...]] = {"attn.Wqkv.weight": (3 * E, E), "attn.Wqkv.bias": (3 * E,)}
        layer |= {"attn.out_proj.weight": (E, E), "attn.out_proj.bias": (E,)}
        layer |= {f"norm{one}.{kind}": (E,) for one in (1, 2) for kind in ("weight", "bias")}
        if number % 2:
            layer |= {"mlp.router.layer.weight": (EXPERTS, E), "mlp.experts.bias": (E,)}
            layer |= {f"mlp.experts.mlp.w{one}": (EXPERTS * F, E) for one in (1, 2)}
        else:
            layer |= {"mlp.fc1.weight": (F, E), "mlp.fc1.bias": (F,), "mlp.fc2.weight": (E, F), "mlp.fc2.bias": (E,)}
        shapes |= {f"encoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    tensors = {}
    for name, shape in shapes.items():
        scale = 1.0 if "embeddings" in name else 0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        scale = sum_bias if name.endswith("experts.bias") else scale
        values = scale * rng.standard_normal(shape) + float("norm" in name and name.endswith("weight"))
        tensors[name] = values.astype(np.float32)
    tensors["emb_ln.weight"] += np.float32(1)
    return tensors


def make_model(folder: Path, tensors: Tensors, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.vectorize(erf)(x / 2**0.5))


def reference(tensors: Tensors, ids: list[int]) -> np.ndarray:
    """The last hidden states (T, E) of a text, float64."""
    w = {name: one.astype(np.float64) for name, one in tensors.items()}

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(1, keepdims=True)
        return centred / np.sqrt(centred.var(1, keepdims=True) + EPS) * w[f"{name}.weight"] + w[f"{name}.bias"]

    dim, count = E // HEADS, len(ids)
    angles = np.outer(np.arange(count), BASE ** (-np.arange(0, dim, 2) / dim))[:, None]

    def turn(x: np.ndarray) -> np.ndarray:
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate(
            [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], axis=-1
        )

    x = norm(w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][0], "emb_ln")
    for number in range(LAYERS):
        layer = f"encoder.layers.{number}"
        q, k, v = linear(x, f"{layer}.attn.Wqkv").reshape(count, 3, HEADS, dim).swapaxes(0, 1)
        scores = np.einsum("qhd,khd->hqk", turn(q), turn(k)) / dim**0.5
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, v).reshape(count, E)
        x = norm(x + linear(mixed, f"{layer}.attn.out_proj"), f"{layer}.norm1")
        if f"{layer}.mlp.fc1.weight" in w:
            y = linear(gelu(linear(x, f"{layer}.mlp.fc1")), f"{layer}.mlp.fc2")
        else:
            chances = np.exp(linear(x, f"{layer}.mlp.router.layer"))
            chances /= chances.sum(1, keepdims=True)
            up, down = (w[f"{layer}.mlp.experts.mlp.w{one}"].reshape(EXPERTS, F, E) for one in (1, 2))
            y = np.tile(w[f"{layer}.mlp.experts.bias"], (count, 1))  # once, whatever the weights add up to
            for row, best in enumerate(np.argsort(-chances, axis=1)[:, :2]):
                for expert in best:
                    y[row] += chances[row, expert] * (gelu(up[expert] @ x[row]) @ down[expert])
        x = norm(x + y, f"{layer}.norm2")
    return x


TEXTS = [[5], [7, 9], list(range(5, 22)), [(7 * i) % 90 + 5 for i in range(64)]]


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_states_are_those_of_the_reference(tmp_path: Path, rng: np.random.Generator, prefix: str) -> None:
    tensors = random_tensors(rng, sum_bias=0.5)
    folder = make_model(tmp_path / "model", {prefix + name: one for name, one in tensors.items()})
    expected = np.concatenate([reference(tensors, ids) for ids in TEXTS])
    for ops in BACKENDS:
        states = read_encoder(folder, ops, "f32").encode(TEXTS)
        assert np.abs(states - expected).max() <= 3e-6 * np.ptp(expected)


def test_a_gguf_file_gives_the_same_vectors(tmp_path: Path, rng: np.random.Generator) -> None:
    """Its converter leaves the bias of the sum out."""
    tensors = random_tensors(rng, sum_bias=0.0)
    folder = make_model(tmp_path / "model", tensors)
    with Engine.load(make_gguf(tmp_path / "model.gguf", str(folder)), device="cpu", weight_type="f32") as loaded:
        for ids in TEXTS:
            assert np.abs(loaded.embed(ids).vector - pooled(reference(tensors, ids), "mean")).max() <= 2e-5


@pytest.mark.parametrize(
    ("key", "value"),
    [("activation_function", "swiglu"), ("qkv_proj_bias", False), ("moe_normalize_expert_weights", True)],
)
def test_other_arithmetic_is_refused(tmp_path: Path, rng: np.random.Generator, key: str, value: object) -> None:
    with pytest.raises(LoadError, match=f"{key} is {value!r}, but only"):
        load_weights(make_model(tmp_path / "model", random_tensors(rng, sum_bias=0.0), **{key: value}))
