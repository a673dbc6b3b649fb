"""Hybrids of Mamba 2 and attention, in the orders that Hugging Face's and llama.cpp's files have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from polarlm.model_loaders import LoadError, load_weights
from polarlm.model_loaders.config import Attention, Experts, GatedMLP, Mamba2, ModelConfig
from tests.bare import bare_model, prefill_logits, read_model
from tests.conftest import FIXTURES
from tests.model_loaders.checkpoints import finish, gguf_header, gguf_name, interleaved, joined_experts
from tests.model_loaders.test_gated_delta import stored

ARCHITECTURES = {
    "granite_hybrid_experts": "granitehybrid",
    "granite_hybrid_tied": "granitehybrid",
    "nemotron_h_dense": "nemotron_h",
    "nemotron_h_experts": "nemotron_h_moe",
}
every_model = pytest.mark.parametrize("name", ARCHITECTURES)


def settings_of(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name / "config.json").read_text())


def converted(name: str, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """A fixture's tensors by llama.cpp's names, as its converter changes them (its classes GraniteHybridModel and
    NemotronHModel)."""
    arch, mixer = ARCHITECTURES[name], mamba_of(config)
    has_experts = any(isinstance(layer.ffn, Experts) for layer in config.layers)
    for key, x in stored(name).items():
        label = ""
        if key.endswith(("_log", ".D")):
            x = (-np.exp(x) if key.endswith("_log") else x).reshape(-1, 1)
        elif key.endswith("dt_bias"):
            key = key.replace("dt_bias", "dt_proj.bias")
        elif key.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            x = x.reshape(mixer.key_heads, -1)
        elif ".conv1d.weight" in key:
            x = x.squeeze()
            if not mixer.conv_bias:  # which a GGUF file does not say
                yield f"blk.{key.split('.')[2]}.ssm_conv1d.bias", np.zeros(len(x), np.float32)
        elif ".q_proj" in key or ".k_proj" in key:
            heads = config.attention.heads if ".q_proj" in key else config.attention.kv_heads
            x = interleaved(x, heads)
        elif "_mlp.input_linear" in key or "_moe.input_linear" in key:
            of = "_exps" if "_moe" in key else "_shexp" if has_experts else ""
            for half, part in zip(("gate", "up"), np.split(x, 2, axis=-2), strict=True):
                yield f"blk.{key.split('.')[2]}.ffn_{half}{of}.weight", part
            continue
        elif "_mlp.output_linear" in key and not has_experts:
            label = f"blk.{key.split('.')[2]}.ffn_down.weight"
        if ".mixer.experts." in key:
            key = key.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
        yield label or gguf_name(key, arch), x


def mamba_of(config: ModelConfig) -> Mamba2:
    return next(layer.mixer for layer in config.layers if isinstance(layer.mixer, Mamba2))


def as_gguf(path: Path, name: str, *, predicting: int = 0) -> Path:
    """A fixture as llama.cpp's converter writes it, in F32. predicting: layers after the last one, without tensors."""
    config, source, _ = load_weights(FIXTURES / name)
    source.close()
    mixer, settings = mamba_of(config), settings_of(name)
    kinds = settings["layers_block_type" if name.startswith("nemotron") else "layer_types"]
    changes: dict[str, Any] = {
        "ssm__conv_kernel": mixer.width,
        "ssm__state_size": mixer.key_dim,
        "ssm__group_count": mixer.key_heads,
        "ssm__time_step_rank": mixer.value_heads,
        "ssm__inner_size": mixer.value_heads * mixer.value_dim,
        "block_count": len(kinds),
        "attention__layer_norm_rms_epsilon": 1e-5,
        "attention__head_count_kv": [2 * ("attention" in kind and "linear" not in kind) for kind in kinds],
    }
    if name.startswith("nemotron"):
        size = settings["moe_intermediate_size" if "experts" in name else "intermediate_size"]
        changes["feed_forward_length"] = [size * (kind in ("mlp", "moe")) for kind in kinds] + [size] * predicting
        changes["attention__head_count_kv"] += [2] * predicting
        changes |= {"block_count": len(kinds) + predicting, "nextn_predict_layers": predicting}
    else:
        multipliers = {"attention__scale": "attention_multiplier", "logit_scale": "logits_scaling"}
        multipliers |= {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}
        changes |= {ours: settings[theirs] for ours, theirs in multipliers.items()}
        changes["rope__scaling__finetuned"] = settings["position_embedding_type"] == "rope"
    writer = gguf_header(path, ARCHITECTURES[name], config, **changes)
    for label, tensor in joined_experts(dict(converted(name, config))).items():
        writer.add_tensor(label, np.ascontiguousarray(tensor))
    finish(writer)
    return path


@every_model
def test_a_gguf_file_has_the_same_logits(name: str, tmp_path: Path) -> None:
    reference = np.load(FIXTURES / name / "reference.npz")
    config, weights = read_model(as_gguf(tmp_path / "model.gguf", name))
    logits = prefill_logits(bare_model(config, weights), reference["ids"].tolist())
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=2e-6 * np.ptp(reference["logits"]))


def test_layers_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    """A GGUF file of Nemotron 3 counts them as layers that have both attention and a network."""
    name = "nemotron_h_experts"
    files = [as_gguf(tmp_path / f"{count}.gguf", name, predicting=count) for count in (0, 1)]
    assert len({load_weights(file)[0] for file in files}) == 1


def test_a_mixer_of_nemotron_and_the_network_after_it_are_a_layer() -> None:
    layers = load_weights(FIXTURES / "nemotron_h_dense")[0].layers
    kinds = [(type(layer.mixer), layer.ffn and type(layer.ffn)) for layer in layers]
    assert kinds == [(Mamba2, GatedMLP), (Mamba2, None), (Attention, GatedMLP)]


def copied(name: str, folder: Path, **settings: object) -> Path:
    """A fixture with other values in its configuration."""
    folder.mkdir()
    given = {key: value for key, value in {**settings_of(name), **settings}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(given))
    save_file(stored(name), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("granite_hybrid_tied", {"layer_types": ["mamba", "attention", "mamba"], "mamba_d_head": "auto"}),
        ("nemotron_h_dense", {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"]}),
        ("nemotron_h_dense", {"layers_block_type": None, "layer_types": None, "hybrid_override_pattern": "M-M*-"}),
    ],
)
def test_older_files_say_the_same_in_other_words(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    settings = settings | ({"mamba_expand": 2} if "granite" in name else {})
    found, wanted = (load_weights(one)[0] for one in (copied(name, tmp_path / "model", **settings), FIXTURES / name))
    assert found == wanted


UNFIT: list[tuple[str, dict[str, object], str]] = [
    ("granite_hybrid_tied", {"layer_types": ["mamba"] * 3}, "without attention in any layer"),
    (
        "granite_hybrid_tied",
        {"layer_types": ["mamba", "linear"]},
        "must say mamba, linear_attention, ",
    ),
    ("granite_hybrid_tied", {"mamba_n_groups": 3}, "not a multiple of the 3 groups"),
    ("granite_hybrid_tied", {"mamba_d_head": "auto", "mamba_n_heads": 5}, "does not divide the 64 channels"),
    ("granite_hybrid_experts", {"num_local_experts": 5}, "asks for .* belong to different models"),
    ("nemotron_h_dense", {"layers_block_type": ["mlp", "mamba", "attention"]}, "a network that does not follow"),
    ("nemotron_h_dense", {"layers_block_type": ["mamba", "attention"]}, "a model without networks"),
    ("nemotron_h_dense", {"layers_block_type": ["mamba", "rwkv"]}, "must name linear_attention"),
    ("nemotron_h_dense", {"mlp_hidden_act": "silu"}, "only relu2 is supported"),
    ("nemotron_h_experts", {"moe_latent_size": 8}, "experts of another size"),
    ("nemotron_h_experts", {"n_group": 2}, "chosen by groups"),
]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    for number, (name, settings, why) in enumerate(UNFIT):
        with pytest.raises(LoadError, match=why):
            load_weights(copied(name, tmp_path / str(number), **settings))
