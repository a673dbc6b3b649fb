"""EAGLE-3 heads for tests: of random weights, in the forms of their files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.tiny import VOCABULARY, make_model

DRAFTED_IDS = [*range(5, VOCABULARY, 2)]  # ids that a head with a vocabulary of its own can draft
HEADS, KV_HEADS, D, F = 4, 1, 16, 96


def hidden_size(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    return int(config.get("text_config", config)["hidden_size"])


def head_tensors(model: Path, *, ids: list[int] | None = None, states: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of a head for a model with hidden states of its size, by their names in EAGLE's files. ids: of its
    own vocabulary."""
    rng, e = np.random.default_rng(seed), hidden_size(model)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    layer = {
        "self_attn.q_proj": matrix(HEADS * D, 2 * e),
        "self_attn.k_proj": matrix(KV_HEADS * D, 2 * e),
        "self_attn.v_proj": matrix(KV_HEADS * D, 2 * e),
        "self_attn.o_proj": matrix(e, HEADS * D),
        "mlp.gate_proj": matrix(F, e),
        "mlp.up_proj": matrix(F, e),
        "mlp.down_proj": matrix(e, F),
        **{
            name: rng.normal(1, 0.2, e).astype(np.float32)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
    }
    tensors = {f"midlayer.{name}.weight": value for name, value in layer.items()}
    tensors |= {
        "fc.weight": matrix(e, states * e),
        "norm.weight": rng.normal(1, 0.2, e).astype(np.float32),
        "lm_head.weight": 3 * matrix(len(ids or range(VOCABULARY)), e),
    }
    if ids is not None:
        tensors["d2t"] = np.array(ids) - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(VOCABULARY), ids)
    return tensors


def head_config(model: Path, tensors: dict[str, np.ndarray], **more: Any) -> dict[str, Any]:
    e = hidden_size(model)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": e,
        "intermediate_size": F,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": D,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        **more,
    }


def make_head(folder: Path, model: Path, *, ids: list[int] | None = None, states: int = 3, **more: Any) -> Path:
    """Fill `folder` with a head for `model`. more: keys of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = head_tensors(model, ids=ids, states=states)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head_config(model, tensors, **more)))
    return folder


def with_head(folder: Path, fixture: str = "llama_gqa_linear", **more: Any) -> tuple[Path, Path]:
    """A model, and a head in a folder inside it."""
    model = make_model(folder, fixture)
    return model, make_head(folder / "head", model, **more)


# -- the formulas, in float64 ----------------------------------------------------------------------------------------


def _norm(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _rotated(x: np.ndarray, places: np.ndarray, factor: float) -> np.ndarray:
    """RoPE of heads x (T, H, D)."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.outer(places / factor, 10_000.0 ** (-np.arange(half) / half)))[:, None]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Of the last rows q (T, H, D) to k, v (N, K, D), causally → (T, H·D)."""
    k, v = (np.repeat(one, q.shape[1] // one.shape[1], axis=1) for one in (k, v))
    scores = np.einsum("thd,nhd->htn", q, k) / np.sqrt(q.shape[-1])
    seen = np.arange(len(k)) <= np.arange(len(k) - len(q), len(k))[:, None]
    weights = np.exp(np.where(seen, scores, -np.inf))
    return np.einsum("htn,nhd->thd", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), -1)


def _network(x: np.ndarray, w: dict[str, np.ndarray], prefix: str) -> np.ndarray:
    gate, up, down = (w[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return (x @ gate / (1 + np.exp(-x @ gate)) * (x @ up)) @ down


def _weights(folder: Path) -> dict[str, np.ndarray]:
    return {name: value.astype(np.float64) for name, value in load_file(folder / "model.safetensors").items()}


def hidden_states(model: Path, ids: Sequence[int]) -> list[np.ndarray]:
    """Of a model of Llama's form: before each layer, and after the last one, (T, E)."""
    w, config = _weights(model), json.loads((model / "config.json").read_text())
    d, factor = config["head_dim"], (config.get("rope_scaling") or {"factor": 1.0})["factor"]
    x, places = w["model.embed_tokens.weight"][np.asarray(ids)], np.arange(len(ids))
    found = [x]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        y = _norm(x, w[f"{prefix}input_layernorm.weight"])
        q, k, v = ((y @ w[f"{prefix}self_attn.{one}_proj.weight"].T).reshape(len(x), -1, d) for one in "qkv")
        mixed = _attention(_rotated(q, places, factor), _rotated(k, places, factor), v)
        x = x + mixed @ w[f"{prefix}self_attn.o_proj.weight"].T
        x = x + _network(_norm(x, w[f"{prefix}post_attention_layernorm.weight"]), w, prefix)
        found.append(x)
    return found


def drafts(model: Path, head: Path, ids: Sequence[int], count: int) -> tuple[list[int], float]:
    """The tokens that a head drafts after `ids`, and by how much the least sure of them was more likely (in logits).

    Row i of the head has token i and the hidden state before it. Its first token has keys and values of 0.
    """
    w, config = _weights(head), json.loads((head / "config.json").read_text())
    states = hidden_states(model, ids)
    joined = np.concatenate([states[at] for at in config["eagle_aux_hidden_state_layer_ids"]], axis=1)
    state = list(joined[:-1] @ w["fc.weight"].T)
    table, newest = _weights(model)["model.embed_tokens.weight"], list(ids)
    k, v = (np.zeros((1, KV_HEADS, D)) for _ in range(2))
    guesses, margin = list[int](), np.inf
    for at in range(1, len(ids) + count - 1):
        one = state[at - 1]
        normed = _norm(one, w["midlayer.hidden_norm.weight"])
        both = np.concatenate([_norm(table[newest[at]], w["midlayer.input_layernorm.weight"]), normed])
        parts = (both @ w[f"midlayer.self_attn.{side}_proj.weight"].T for side in "qkv")
        q, k_new, v_new = (part.reshape(1, -1, D) for part in parts)
        place = np.array([at])
        k, v = np.concatenate([k, _rotated(k_new, place, 1.0)]), np.concatenate([v, v_new])
        if at < len(ids) - 1:
            continue
        x = normed if config.get("norm_before_residual") else one
        x = x + _attention(_rotated(q, place, 1.0), k, v)[0] @ w["midlayer.self_attn.o_proj.weight"].T
        x = x + _network(_norm(x, w["midlayer.post_attention_layernorm.weight"]), w, "midlayer.")
        logits = _norm(x, w["norm.weight"]) @ w["lm_head.weight"].T
        best = int(logits.argmax())
        margin = min(margin, float(np.diff(np.sort(logits)[-2:])[0]))
        guesses.append(best + int(w["d2t"][best]) if "d2t" in w else best)
        newest.append(guesses[-1])
        state.append(x)
    return guesses, margin
