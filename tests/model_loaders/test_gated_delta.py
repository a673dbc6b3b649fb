"""Hybrids of gated delta rules and attention, in the orders that Hugging Face's and llama.cpp's files have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from polarlm.model_loaders import LoadError, load_weights
from polarlm.model_loaders.config import GatedDelta, ModelConfig
from polarlm.model_loaders.files.safetensors_source import open_safetensors
from tests.bare import bare_model, prefill_logits, read_model
from tests.conftest import FIXTURES
from tests.model_loaders.checkpoints import finish, gguf_header, gguf_name, joined_experts, read_all

ARCHITECTURES = {
    "qwen3_next_shared_keys": "qwen3next",
    "qwen3_5_tied": "qwen35",
    "qwen3_5_moe_with_images": "qwen35moe",
}
every_model = pytest.mark.parametrize("name", ARCHITECTURES)


def stored(name: str) -> dict[str, np.ndarray]:
    """The tensors of a fixture, float32."""
    source, found = open_safetensors(FIXTURES / name), {}
    for tensor in source.names():
        found[tensor] = np.empty(source.shape(tensor), np.float32)
        source.read_into(tensor, found[tensor])
    source.close()
    return found


def converted(tensors: dict[str, np.ndarray], mixer: GatedDelta, arch: str) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors under Hugging Face's names, as llama.cpp's converter changes them (its classes Qwen3NextModel and
    _LinearAttentionVReorderBase): value heads that share a key are far apart in files of Qwen3.5."""
    keys, shared = mixer.key_heads, mixer.value_heads // mixer.key_heads
    values = mixer.value_heads * mixer.value_dim

    def tiled(x: np.ndarray, axis: int = 0) -> np.ndarray:
        if arch == "qwen3next":
            return x
        heads = np.moveaxis(x, axis, 0).reshape(keys, shared, -1, *np.moveaxis(x, axis, 0).shape[1:])
        return np.moveaxis(heads.swapaxes(0, 1).reshape(np.moveaxis(x, axis, 0).shape), 0, axis)

    for name, x in tensors.items():
        name = name.replace("model.language_model.", "model.")
        if name.startswith("model.visual."):
            continue
        if name.endswith(".A_log"):
            x = tiled(-np.exp(x))
        elif name.endswith(".dt_bias"):
            name, x = name.replace(".dt_bias", ".dt_proj.bias"), tiled(x)
        elif ".conv1d" in name:
            x = x.squeeze()
            x = np.concatenate([x[:-values], tiled(x[-values:])])
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            x = x + 1
        elif ".in_proj_qkvz" in name:
            sizes = [mixer.key_dim] * 2 + [shared * mixer.value_dim] * 2
            parts = np.split(x.reshape(keys, sum(sizes), -1), np.cumsum(sizes)[:-1], axis=1)
            q, k, v, z = (part.reshape(-1, x.shape[1]) for part in parts)
            yield name.replace("qkvz", "qkv"), np.concatenate([q, k, v])
            name, x = name.replace("qkvz", "z"), z
        elif ".in_proj_qkv." in name:
            x = np.concatenate([x[:-values], tiled(x[-values:])])
        elif ".in_proj_z" in name or ".in_proj_b." in name or ".in_proj_a." in name:
            x = tiled(x)
        elif ".out_proj" in name and "linear_attn" in name:
            x = tiled(x, axis=1)
        yield name, x


def delta_of(config: ModelConfig) -> GatedDelta:
    return next(layer.mixer for layer in config.layers if isinstance(layer.mixer, GatedDelta))


def as_gguf(path: Path, name: str, **changes: Any) -> Path:
    """A fixture as llama.cpp's converter writes it, in F32."""
    config, source, _ = load_weights(FIXTURES / name)
    source.close()
    arch, mixer = ARCHITECTURES[name], delta_of(config)
    changes = {
        "ssm__conv_kernel": mixer.width,
        "ssm__state_size": mixer.key_dim,
        "ssm__group_count": mixer.key_heads,
        "ssm__time_step_rank": mixer.value_heads,
        "ssm__inner_size": mixer.value_heads * mixer.value_dim,
        "full_attention_interval": 4 if name == "qwen3_5_tied" else 2,
        **changes,
    }
    writer = gguf_header(path, arch, config, **changes)
    found = {gguf_name(key, arch): tensor for key, tensor in converted(stored(name), mixer, arch)}
    for label, tensor in joined_experts(found).items():
        writer.add_tensor(label, np.ascontiguousarray(tensor))
    finish(writer)
    return path


def _assert_close(logits: np.ndarray, wanted: np.ndarray) -> None:
    """The order in which a BLAS sums float32 changes a row of `qwen3_5_tied` by 1.5e-5 of the range of its logits, and
    most rows by a millionth."""
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=3e-5 * np.ptp(wanted))


@every_model
def test_a_gguf_file_has_the_same_logits(name: str, tmp_path: Path) -> None:
    config, weights = read_model(as_gguf(tmp_path / "model.gguf", name))
    reference = np.load(FIXTURES / name / "reference.npz")
    logits = prefill_logits(bare_model(config, weights), reference["ids"].tolist())
    _assert_close(logits, reference["logits"])
    of_file, of_folder = delta_of(config), delta_of(load_weights(FIXTURES / name)[0])
    assert of_file.tiled == (name == "qwen3_5_moe_with_images")
    assert (of_file.key_heads, of_file.width) == (of_folder.key_heads, of_folder.width)


def copied(name: str, folder: Path, tensors: dict[str, np.ndarray], **settings: object) -> Path:
    """A fixture with other tensors, and with other values in its configuration."""
    folder.mkdir()
    config = json.loads((FIXTURES / name / "config.json").read_text())
    config.get("text_config", config).update(settings)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


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
    found, wanted = (load_weights(path)[1] for path in (copied(name, tmp_path / "model", tensors), FIXTURES / name))
    assert found.names() == wanted.names()
    wanted_values = read_all(wanted)
    for key, value in read_all(found).items():
        np.testing.assert_array_equal(value, wanted_values[key], err_msg=key)
    found.close()


def test_heads_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    """In folders they have names of their own, in GGUF files they are counted as layers."""
    name = "qwen3_5_tied"
    tensors = stored(name) | {"mtp.layers.0.input_layernorm.weight": np.ones(32, np.float32)}
    config = load_weights(copied(name, tmp_path / "model", tensors))[0]
    more = as_gguf(tmp_path / "model.gguf", name, block_count=5, nextn_predict_layers=1)
    assert len(config.layers) == len(load_weights(more)[0].layers) == 4


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "a model without attention in any layer is not supported"),
        ({"layer_types": ["linear_attention", "mamba"] * 2}, "must say linear_attention or full_attention"),
        ({"linear_num_value_heads": 3}, "not a multiple of the 2 key heads"),
        ({"linear_num_key_heads": 1}, "has the shape"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, object], why: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=why):
        load_weights(copied("qwen3_5_tied", tmp_path / "model", stored("qwen3_5_tied"), **settings))


def test_a_lacking_tensor_has_the_name_that_files_have(tmp_path: Path) -> None:
    tensors = stored("qwen3_5_tied")
    tensors.pop("model.layers.3.self_attn.q_proj.weight")
    with pytest.raises(LoadError, match=r"lacks the tensor model\.layers\.3\.self_attn\.q_proj\.weight"):
        load_weights(copied("qwen3_5_tied", tmp_path / "model", tensors))
