"""Hybrids of attention and recurrent layers, in the orders that Hugging Face's and llama.cpp's files have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from polarlm.model_loaders import families, load_weights
from polarlm.model_loaders.config import ChannelDelta, Experts, GatedDelta, GatedMLP, Mamba2, ModelConfig, Recurrent
from polarlm.model_loaders.files.safetensors_source import open_safetensors
from tests.bare import bare_model, prefill_logits, read_model
from tests.conftest import FIXTURES
from tests.model_loaders.checkpoints import (
    copied,
    finish,
    gguf_header,
    gguf_name,
    granite_config,
    interleaved,
    joined_experts,
    read_all,
)

ARCHITECTURES = {
    "qwen3_next_shared_keys": "qwen3next",
    "qwen3_5_tied": "qwen35",
    "qwen3_5_moe_with_images": "qwen35moe",
    "granite_hybrid_experts": "granitehybrid",
    "granite_hybrid_tied": "granitehybrid",
    "nemotron_h_dense": "nemotron_h",
    "nemotron_h_experts": "nemotron_h_moe",
    "nemotron_h_latent": "nemotron_h_moe",
    "kimi_linear_nope": "kimi-linear",
}
Tensors = Iterator[tuple[str, np.ndarray]]


def stored(name: str) -> dict[str, np.ndarray]:
    return read_all(open_safetensors(FIXTURES / name))


def settings_of(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name / "config.json").read_text())


def recurrent_of(config: ModelConfig) -> Recurrent:
    return next(layer.mixer for layer in config.layers if isinstance(layer.mixer, Recurrent))


def converted_delta(name: str, mixer: Recurrent) -> Tensors:
    """A fixture's tensors by llama.cpp's names, as its converter changes them (its classes Qwen3NextModel and
    _LinearAttentionVReorderBase): value heads that share a key are far apart in files of Qwen3.5."""
    arch = ARCHITECTURES[name]
    keys, shared = mixer.key_heads, mixer.value_heads // mixer.key_heads
    values = mixer.value_heads * mixer.value_dim

    def tiled(x: np.ndarray, axis: int = 0) -> np.ndarray:
        if arch == "qwen3next":
            return x
        heads = np.moveaxis(x, axis, 0).reshape(keys, shared, -1, *np.moveaxis(x, axis, 0).shape[1:])
        return np.moveaxis(heads.swapaxes(0, 1).reshape(np.moveaxis(x, axis, 0).shape), 0, axis)

    for key, x in stored(name).items():
        key = key.replace("model.language_model.", "model.")
        if key.startswith("model.visual."):
            continue
        if key.endswith(".A_log"):
            x = tiled(-np.exp(x))
        elif key.endswith(".dt_bias"):
            key, x = key.replace(".dt_bias", ".dt_proj.bias"), tiled(x)
        elif ".conv1d" in key:
            x = x.squeeze()
            x = np.concatenate([x[:-values], tiled(x[-values:])])
        elif key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
            x = x + 1
        elif ".in_proj_qkvz" in key:
            sizes = [mixer.key_dim] * 2 + [shared * mixer.value_dim] * 2
            parts = np.split(x.reshape(keys, sum(sizes), -1), np.cumsum(sizes)[:-1], axis=1)
            q, k, v, z = (part.reshape(-1, x.shape[1]) for part in parts)
            yield gguf_name(key.replace("qkvz", "qkv"), arch), np.concatenate([q, k, v])
            key, x = key.replace("qkvz", "z"), z
        elif ".in_proj_qkv." in key:
            x = np.concatenate([x[:-values], tiled(x[-values:])])
        elif ".in_proj_z" in key or ".in_proj_b." in key or ".in_proj_a." in key:
            x = tiled(x)
        elif ".out_proj" in key and "linear_attn" in key:
            x = tiled(x, axis=1)
        yield gguf_name(key, arch), x


def converted_mamba(name: str, config: ModelConfig, mixer: Mamba2) -> Tensors:
    """As `converted_delta`: its classes GraniteHybridModel and NemotronHModel."""
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
        yield label or gguf_name(key, ARCHITECTURES[name]), x


def converted_channels(name: str, config: ModelConfig) -> Tensors:
    """As `converted_delta`: its class KimiLinearModel."""
    heads, own = config.attention.heads, config.attention.own_dim
    for key, x in stored(name).items():
        if key.endswith(".A_log"):
            x = -np.exp(x)
        elif key.endswith(".dt_bias"):
            key = key.replace(".dt_bias", ".dt_proj.bias")
        elif "_conv1d." in key:
            x = x.reshape(1, len(x), 1, -1)
        elif ".kv_b_proj." in key:
            k, v = np.split(x.reshape(heads, -1, x.shape[1]), [own], axis=1)
            yield gguf_name(key.replace("kv_b", "k_b"), ARCHITECTURES[name]), k.swapaxes(1, 2)
            key, x = key.replace("kv_b", "v_b"), v
        yield gguf_name(key, ARCHITECTURES[name]), x


def channel_metadata(config: ModelConfig, mixer: ChannelDelta) -> dict[str, Any]:
    return {
        "ssm__conv_kernel": mixer.width,
        "kda__head_dim": mixer.key_dim,
        "attention__head_count_kv": [int(number in config.attentions) for number in range(len(config.layers))],
        "leading_dense_block_count": sum(isinstance(layer.ffn, GatedMLP) for layer in config.layers),
        "expert_gating_func": 2,
    }


def mamba_metadata(name: str, predicting: int) -> dict[str, Any]:
    settings = settings_of(name)
    kinds = settings["layers_block_type" if name.startswith("nemotron") else "layer_types"]
    changes: dict[str, Any] = {
        "block_count": len(kinds) + predicting,
        "attention__layer_norm_rms_epsilon": 1e-5,
        "attention__head_count_kv": [2 * ("attention" in kind and "linear" not in kind) for kind in kinds]
        + [2] * predicting,
    }
    if name.startswith("nemotron"):
        size = settings["intermediate_size" if "dense" in name else "moe_intermediate_size"]
        sizes = [size * (kind in ("mlp", "moe")) for kind in kinds] + [size] * predicting
        return {**changes, "feed_forward_length": sizes, "nextn_predict_layers": predicting}
    return {
        **changes,
        **granite_config(settings),
        "rope__scaling__finetuned": settings["position_embedding_type"] == "rope",
    }


def as_gguf(path: Path, name: str, *, predicting: int = 0) -> Path:
    """A fixture as llama.cpp's converter writes it, in F32. predicting: layers after the last one, without tensors."""
    config = load_weights(FIXTURES / name)[0]
    mixer = recurrent_of(config)
    changes: dict[str, Any] = {
        "ssm__conv_kernel": mixer.width,
        "ssm__state_size": mixer.key_dim,
        "ssm__group_count": mixer.key_heads,
        "ssm__time_step_rank": mixer.value_heads,
        "ssm__inner_size": mixer.value_heads * mixer.value_dim,
    }
    if isinstance(mixer, ChannelDelta):
        changes = channel_metadata(config, mixer)
        tensors, more = converted_channels(name, config), {}
    elif isinstance(mixer, Mamba2):
        tensors, more = converted_mamba(name, config, mixer), mamba_metadata(name, predicting)
    else:
        tensors, more = converted_delta(name, mixer), {"full_attention_interval": 4 if name == "qwen3_5_tied" else 2}
        more |= {"block_count": len(config.layers) + predicting, "nextn_predict_layers": predicting}
    writer = gguf_header(path, ARCHITECTURES[name], config, **changes, **more)
    for label, tensor in joined_experts(dict(tensors)).items():
        writer.add_tensor(label, np.ascontiguousarray(tensor))
    finish(writer)
    return path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_has_the_same_logits(name: str, tmp_path: Path) -> None:
    """The order in which a BLAS sums float32 changes a row of `qwen3_5_tied` by 1.5e-5 of the range of its logits, and
    most rows of all models by a millionth."""
    config, weights = read_model(as_gguf(tmp_path / "model.gguf", name))
    reference = np.load(FIXTURES / name / "reference.npz")
    logits, mixer = prefill_logits(bare_model(config, weights), reference["ids"].tolist()), recurrent_of(config)
    atol = (3e-5 if isinstance(mixer, GatedDelta | ChannelDelta) else 2e-6) * np.ptp(reference["logits"])
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=atol)
    assert mixer.tiled == (name == "qwen3_5_moe_with_images")


@pytest.mark.parametrize("name", ["qwen3_5_tied", "nemotron_h_experts"])
def test_layers_that_predict_several_tokens_are_left_out(name: str, tmp_path: Path) -> None:
    """GGUF files count them as layers, Nemotron 3's as layers that have both attention and a network."""
    files = [as_gguf(tmp_path / f"{count}.gguf", name, predicting=count) for count in (0, 1)]
    assert len({load_weights(file)[0] for file in files}) == 1


def test_the_layer_of_nemotron_that_predicts_has_one_number_in_gguf_files() -> None:
    """As llama.cpp's class NemotronHModel names its tensors: the norm of its experts as others' after attention."""
    of_attention = "ATTN_NORM ATTN_Q ATTN_K ATTN_V ATTN_OUT ATTN_POST_NORM"
    of_experts = "FFN_GATE_INP FFN_UP_EXP FFN_DOWN_EXP MOE_LATENT_DOWN MOE_LATENT_UP FFN_UP_SHEXP FFN_DOWN_SHEXP"
    own = "NEXTN_EH_PROJ NEXTN_ENORM NEXTN_HNORM NEXTN_SHARED_HEAD_NORM"
    theirs = [gguf.MODEL_TENSOR[part] for part in f"{of_attention} {of_experts} {own}".split()]
    table = families.tensors(load_weights(FIXTURES / "nemotron_h_latent")[0].with_mtp())
    found = {spec.gguf.partition("[")[0] for specs in table.layers[-1].values() for spec in specs}
    kinds = len(settings_of("nemotron_h_latent")["layers_block_type"])
    named = {f"{gguf.TENSOR_NAMES[tensor].format(bid=kinds)}.weight" for tensor in theirs}
    assert found == named | {f"blk.{kinds}.exp_probs_b.bias"}


def test_experts_in_two_tensors_are_taken_apart(tmp_path: Path) -> None:
    """As published files have them; the fixtures have a tensor for each matrix."""
    name = "qwen3_5_moe_with_images"
    whole, tensors = {}, stored(name)
    for key in [key for key in tensors if ".experts." in key]:
        prefix, _, rest = key.partition(".experts.")
        number, kind, _ = rest.split(".")
        whole.setdefault(f"{prefix}.experts", {})[int(number), kind] = tensors.pop(key)
    for prefix, parts in whole.items():
        gates, ups, downs = (
            np.stack([parts[i, kind] for i in range(len(parts) // 3)]) for kind in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{prefix}.gate_up_proj"], tensors[f"{prefix}.down_proj"] = np.concatenate([gates, ups], axis=1), downs
    # A head that predicts several tokens has names of its own, and is left out.
    tensors["mtp.layers.0.input_layernorm.weight"] = np.ones(32, np.float32)
    folder = copied(name, tmp_path / "model")
    save_file(tensors, folder / "model.safetensors")
    got, wanted = (read_all(load_weights(path)[1]) for path in (folder, FIXTURES / name))
    assert got.keys() == wanted.keys()
    for key, value in got.items():
        np.testing.assert_array_equal(value, wanted[key], err_msg=key)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "granite_hybrid_tied",
            {"layer_types": ["mamba", "attention", "mamba"], "mamba_d_head": "auto", "mamba_expand": 2},
        ),
        ("nemotron_h_dense", {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"]}),
        ("nemotron_h_dense", {"layers_block_type": None, "layer_types": None, "hybrid_override_pattern": "M-M*-"}),
    ],
)
def test_older_files_say_the_same_in_other_words(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    paths = copied(name, tmp_path / "model", **settings), FIXTURES / name
    assert len({load_weights(path)[0] for path in paths}) == 1
