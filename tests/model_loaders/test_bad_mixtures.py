"""Files of mixtures of experts that are incomplete, or do not fit their configuration: one sentence each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from polarlm.model_loaders import LoadError, load_weights
from tests.model_loaders.checkpoints import MODELS, as_gguf, read_all
from tests.tiny import make_model

Tensors = dict[str, np.ndarray]
EXPERT = "model.layers.0.mlp.experts.3."


def narrower(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name][:-1]


@pytest.mark.parametrize(
    ("name", "change", "changed", "sentence"),
    [
        ("olmoe_all_heads", {"num_experts_per_tok": 9}, None, "num_experts_per_tok is 9, but .* only 8 experts"),
        ("olmoe_all_heads", {"num_experts": 9}, None, r"lacks .*experts\.8\.gate_proj.* and 3 more"),
        ("olmoe_all_heads", {}, (narrower, f"{EXPERT}down_proj.weight"), r"experts\.3\.down_proj.* has the shape \(31"),
        ("gemma4_experts_beside", {"top_k_experts": 5}, None, "top_k_experts is 5, but each layer has only 4"),
        ("gemma4_experts_beside", {}, (narrower, "model.layers.0.experts.gate_up_proj"), r"\(3, 32, 64\), but .* \(4,"),
    ],
)
def test_folders(
    name: str,
    change: dict[str, int],
    changed: tuple[Callable[[Tensors, str], None], str] | None,
    sentence: str,
    tmp_path: Path,
) -> None:
    make_model(tmp_path, name)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    if changed is not None:
        tensors = load_file(file)
        changed[0](tensors, changed[1])
        save_file(tensors, file)
    with pytest.raises(LoadError, match=sentence):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    ("rule", "dropped", "rows", "sentence"),
    [
        ({"top_k": 9}, None, None, "expert_used_count is 9, but each layer has only 8 experts"),
        ({}, ".experts.7.", None, r"lacks .*ffn_gate_exps\.weight\[7\]"),
        ({}, None, 39, r"ffn_gate_exps.* has the shape \(39, 32\), .* \(40, 32\)"),
    ],
)
def test_gguf_files(rule: dict[str, int], dropped: str | None, rows: int | None, sentence: str, tmp_path: Path) -> None:
    """The same matrix of all experts is one tensor with three dimensions."""
    config, weights, _ = load_weights(MODELS / "olmoe_all_heads")
    tensors = {name: tensor for name, tensor in read_all(weights).items() if dropped is None or dropped not in name}
    for name in tensors:
        tensors[name] = tensors[name][:rows] if name.endswith(".gate_proj.weight") else tensors[name]
    layers = tuple(replace(layer, ffn=replace(layer.ffn, **rule)) for layer in config.layers)
    with pytest.raises(LoadError, match=sentence):
        load_weights(as_gguf(tmp_path / "model.gguf", "olmoe", replace(config, layers=layers), tensors))
