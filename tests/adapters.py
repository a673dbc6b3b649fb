"""Adapters (LoRA) of random numbers, as folders of peft and as GGUF files, and models with the same changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.tiny import make_model

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Changes = dict[str, tuple[np.ndarray, np.ndarray]]
"""Name of a tensor → A (rank, in) and B (out, rank), float32."""


def base_weights(base: Path) -> dict[str, np.ndarray]:
    return load_file(base / "model.safetensors")


def random_changes(base: Path, rank: int, seed: int, modules: tuple[str, ...] = ALL) -> Changes:
    """Changes of all matrices of these modules, large enough for other tokens to be drawn."""
    rng = np.random.default_rng(seed)
    changes = {}
    for name, w in sorted(base_weights(base).items()):
        if name.split(".")[-2] in modules:
            a = rng.standard_normal((rank, w.shape[1])) / np.sqrt(w.shape[1])
            b = rng.standard_normal((w.shape[0], rank)) * 0.5 / np.sqrt(rank)
            changes[name] = a.astype(np.float32), b.astype(np.float32)
    return changes


def write_peft(folder: Path, changes: Changes, alpha: float, **config: Any) -> Path:
    """A folder of peft with these changes; returns it."""
    folder.mkdir(exist_ok=True)
    tensors = {}
    for name, (a, b) in changes.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    rank = len(next(iter(changes.values()))[0])
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(written), encoding="utf-8")
    return folder


def write_gguf(
    path: Path,
    changes: Changes,
    alpha: float,
    heads: Mapping[str, int],
    arch: str = "llama",
    invocation: Sequence[int] = (),
) -> Path:
    """A GGUF file with these changes, in llama.cpp's order of rows; returns it. heads: of "attn_q" and "attn_k".
    invocation: the tokens behind which it acts, if it is an activated LoRA."""
    import gguf  # which a bare machine does not have

    from tests.model_loaders.checkpoints import finish, gguf_name

    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    if invocation:
        writer.add_array("adapter.alora.invocation_tokens", invocation)
    for name, (a, b) in changes.items():
        label = gguf_name(name)
        if (module := label.split(".")[2]) in heads:  # RoPE's pairs are neighbouring channels
            b = b.reshape(heads[module], 2, -1, b.shape[1]).swapaxes(1, 2).reshape(b.shape)
        writer.add_tensor(f"{label}.lora_a", a)
        writer.add_tensor(f"{label}.lora_b", np.ascontiguousarray(b))
    finish(writer)
    return path


def changed_model(folder: Path, base: Path, changes: Changes, scale: float) -> Path:
    """A model in float32 whose matrices have the changes, computed in float64; returns its folder."""
    folder.mkdir()
    make_model(folder)
    weights = {name: w.astype(np.float32) for name, w in base_weights(base).items()}
    for name, (a, b) in changes.items():
        whole = weights[name].astype(np.float64) + scale * b.astype(np.float64) @ a.astype(np.float64)
        weights[name] = whole.astype(np.float32)
    save_file(weights, folder / "model.safetensors")
    return folder
