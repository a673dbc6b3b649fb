"""Adapters (LoRA) from folders of peft and from GGUF files, and those that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import load_file, save_file

from polarlm.model_loaders import LoadError, load_weights
from polarlm.model_loaders.adapters import Adapter, read_adapter
from polarlm.model_loaders.config import Experts, ModelConfig
from tests.adapters import Changes, random_changes, write_gguf, write_peft
from tests.model_loaders.checkpoints import config_of
from tests.tiny import make_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def config(base: Path) -> ModelConfig:
    return config_of(base)


@pytest.fixture
def changes(base: Path) -> Changes:
    return random_changes(base, 4, 0)


def deltas(adapter: Adapter) -> dict[str, np.ndarray]:
    return {name: one.b @ one.a for name, one in adapter.changes.items()}


def assert_is(adapter: Adapter, changes: Changes, scale: float) -> None:
    changed = deltas(adapter)
    assert changed.keys() == changes.keys()
    for name, (a, b) in changes.items():
        np.testing.assert_allclose(changed[name], scale * b @ a, rtol=1e-5, atol=1e-6)


def heads(config: ModelConfig) -> dict[str, int]:
    return {"attn_q": config.attention.heads, "attn_k": config.attention.kv_heads}


@pytest.mark.parametrize(
    ("settings", "scale"), [({}, 3.0), ({"use_rslora": True}, 6.0), ({"lora_alpha": 5}, 1.25)], ids=str
)
def test_a_folder_of_peft_has_its_scale(
    tmp_path: Path, config: ModelConfig, changes: Changes, settings: dict[str, Any], scale: float
) -> None:
    folder = write_peft(tmp_path / "adapter", changes, settings.pop("lora_alpha", 12), **settings)
    adapter = read_adapter(folder, config, is_gguf=False)
    assert_is(adapter, changes, scale)
    assert adapter.dtype == "F32"


def floats(tensor: dict[str, Any]) -> np.ndarray:
    """A tensor of a file, with its rows in the order of the file."""
    if tensor["dtype"] == "F16":
        return np.frombuffer(tensor["data"], "<f2").reshape(tensor["shape"]).astype(np.float32)
    assert tensor["dtype"] == "BF16"
    return (np.frombuffer(tensor["data"], "<u2").astype("<u4") << 16).view("<f4").reshape(tensor["shape"])


@pytest.mark.parametrize(
    ("model", "modules"),
    [
        ("ernie4_5_biases", ("q_proj", "k_proj", "v_proj")),
        ("glm4_moe_lite", ("q_b_proj", "kv_a_proj_with_mqa", "q_a_proj", "o_proj")),
    ],
)
def test_rows_of_neighbouring_channels_are_ordered_as_the_weights_are(
    model: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    """An adapter that adds a model's own weights doubles them."""
    path = make_model(tmp_path, model)
    config, weights, _ = load_weights(path)
    names = [f"model.layers.0.self_attn.{one}.weight" for one in modules]
    stored = {name: np.empty(weights.shape(name), np.float32) for name in names}
    for name, matrix in stored.items():
        weights.read_into(name, matrix)
    weights.close()
    of_file = dict(deserialize((path / "model.safetensors").read_bytes()))
    changes = {name: (floats(of_file[name]), np.eye(len(stored[name]), dtype=np.float32)) for name in names}
    adapter = read_adapter(write_peft(tmp_path / "a", changes, len(stored[names[0]])), config, is_gguf=False)
    for name in names:
        np.testing.assert_allclose(
            deltas(adapter)[name] * len(stored[name]) / len(stored[names[0]]), stored[name], rtol=1e-6
        )


def test_matrices_of_latent_vectors_are_refused(tmp_path: Path) -> None:
    config = config_of(make_model(tmp_path, "glm4_moe_lite"))
    changes = {"model.layers.1.self_attn.kv_b_proj.weight": (np.ones((2, 32)), np.ones((128, 2)))}
    with pytest.raises(LoadError, match=r"kv_b_proj, which makes keys and values of a latent vector"):
        read_adapter(write_peft(tmp_path / "a", changes, 4), config, is_gguf=False)


def test_modules_have_alphas_of_their_own(tmp_path: Path, config: ModelConfig, changes: Changes) -> None:
    pattern = {"q_proj": 8, r"^model\.layers\.[1-9]\..*(up|gate)_proj$": 2, "layers.1.mlp.up_proj": 99}
    adapter = read_adapter(write_peft(tmp_path / "a", changes, 4, alpha_pattern=pattern), config, is_gguf=False)
    scales = {"q_proj": 2.0, "up_proj": 0.5, "gate_proj": 0.5}
    for name, delta in deltas(adapter).items():
        module = name.split(".")[-2]
        scale = scales.get(module, 1.0) if module == "q_proj" or ".1." in name else 1.0
        a, b = changes[name]
        np.testing.assert_allclose(delta, scale * b @ a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [8.0, 0.0])
def test_a_gguf_file_has_what_the_folder_has(
    tmp_path: Path, config: ModelConfig, changes: Changes, alpha: float
) -> None:
    """Rows of queries and keys are in another order there. Without an alpha, the scale is 1."""
    adapter = read_adapter(write_gguf(tmp_path / "a.gguf", changes, alpha, heads(config)), config, is_gguf=False)
    assert_is(adapter, changes, alpha / 4 if alpha else 1.0)


def test_numbers_of_16_bits_stay_so(tmp_path: Path, config: ModelConfig, changes: Changes) -> None:
    narrow = {name: (a.astype(np.float16), b.astype(np.float16)) for name, (a, b) in changes.items()}
    first = read_adapter(write_peft(tmp_path / "a", narrow, 4), config, is_gguf=False)
    assert first.dtype == "F16"
    second = read_adapter(write_peft(tmp_path / "b", narrow, 8), config, is_gguf=False)
    assert first.digest == read_adapter(tmp_path / "a", config, is_gguf=False).digest != second.digest


def refused(path: Path, config: ModelConfig) -> str:
    with pytest.raises(LoadError) as error:
        read_adapter(path, config, is_gguf=False)
    return str(error.value)


KINDS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "DoRA is not supported"),
    ({"bias": "lora_only"}, "biases are not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], but whole matrices, embeddings"),
    ({"peft_type": "IA3"}, "LORA adapters alone are supported, not IA3"),
    ({"fan_in_fan_out": True}, "no supported model has"),
    ({"alpha_pattern": {"(q_proj": 4}}, "'(q_proj' is no regular expression that can be used (missing )"),
    ({"alpha_pattern": {"q" * 1001: 4}}, "(it has more than 1,000 characters)"),
    ({"alora_invocation_tokens": [7, 8]}, "is [7, 8], but an activated LoRA, which acts behind its invocation tokens"),
    ({"use_qalora": True}, "QA-LoRA is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "with which peft changes the base model, too"),
]


def test_other_kinds_are_refused_by_name(tmp_path: Path, config: ModelConfig, changes: Changes) -> None:
    for number, (settings, sentence) in enumerate(KINDS):
        assert sentence in refused(write_peft(tmp_path / str(number), changes, 4, **settings), config)


def test_an_activated_adapter_in_gguf_is_refused(tmp_path: Path, config: ModelConfig, changes: Changes) -> None:
    path = write_gguf(tmp_path / "a.gguf", changes, 8, heads(config), invocation=[7, 8])
    assert "adapter.alora.invocation_tokens is [7, 8], but an activated LoRA" in refused(path, config)


def test_keys_that_nobody_knows_are_told_once(
    tmp_path: Path, config: ModelConfig, changes: Changes, caplog: pytest.LogCaptureFixture
) -> None:
    empty = {"alora_invocation_tokens": [], "modules_to_save": None, "new_variant": False}
    known = {"rank_pattern": {"q_proj": 4}, "target_modules": ["q_proj"], "init_lora_weights": "eva"}
    read_adapter(write_peft(tmp_path / "a", changes, 4, **empty, **known), config, is_gguf=False)
    assert not caplog.messages
    read_adapter(write_peft(tmp_path / "b", changes, 4, new_variant={"x": 1}), config, is_gguf=False)
    assert caplog.messages == [
        f"{tmp_path / 'b' / 'adapter_config.json'} has keys that are unknown here and ignored: 'new_variant'"
    ]


Q = "base_model.model.model.layers.0.self_attn.q_proj"
EMPTY = np.zeros((2, 48), np.float32)
LARGE = np.zeros((513, 48), np.float32)
OF_RANK_513 = {f"{Q}.lora_A.weight": LARGE, f"{Q}.lora_B.weight": LARGE.T.copy()}


def renamed(old: str, new: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


TENSORS: list[tuple[Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], str]] = [
    (lambda t: t | {f"{Q}.lora_magnitude_vector": EMPTY}, "which is DoRA"),
    (lambda t: t | {"base_model.model.model.embed_tokens.lora_embedding_A": EMPTY}, "a change of embeddings"),
    (lambda t: t | {f"{Q}.lora_B.bias": EMPTY}, "a bias, and biases are not supported"),
    (lambda t: t | {"base_model.model.lm_head.weight": EMPTY}, "no low-rank factor"),
    (renamed("model.layers.0.self_attn.q_proj", "lm_head"), "of the output head are not supported"),
    (renamed("layers.0.self_attn.q_proj", "embed_tokens"), "adapters of embeddings"),
    (renamed("self_attn.q_proj", "self_attn.query"), "model with 2 layers does not have"),
    (renamed("mlp.up_proj", "mlp.experts.0.up_proj"), "model with 2 layers does not have"),
    (lambda t: {k: v for k, v in t.items() if k != f"{Q}.lora_B.weight"}, "lacks factor B"),
    (lambda t: t | {f"{Q}.lora_A.weight": np.zeros((4, 40), np.float32)}, "belongs to another base model"),
    (lambda t: t | {f"{Q}.lora_B.weight": np.zeros((48, 3), np.float32)}, "cannot be multiplied"),
    (lambda t: t | {f"{Q}.lora_A.weight": np.full((4, 48), np.nan, np.float32)}, "not finite"),
    (lambda t: t | OF_RANK_513, "the rank of model.layers.0.self_attn.q_proj is 513, but 1 to 512"),
    (lambda t: {}, "holds no low-rank factors"),
]


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, config: ModelConfig, changes: Changes) -> None:
    folder = write_peft(tmp_path / "a", changes, 4)
    weights = folder / "adapter_model.safetensors"
    whole = load_file(weights)
    for change, sentence in TENSORS:
        save_file(change(whole), weights)
        assert sentence in refused(folder, config)


def test_routers_and_missing_experts_are_refused_by_name(tmp_path: Path, config: ModelConfig, changes: Changes) -> None:
    layers = tuple(replace(layer, ffn=Experts(4, 2, 64)) for layer in config.layers)
    mixture = replace(config, family="qwen3_moe", layers=layers)
    a, b = np.zeros((4, 48), np.float32), np.zeros((4, 4), np.float32)
    folder = write_peft(tmp_path / "router", {"model.layers.0.mlp.gate.weight": (a, b)}, 4)
    assert "a router of experts" in refused(folder, mixture)
    folder = write_peft(tmp_path / "missing", {"model.layers.0.mlp.experts.4.up_proj.weight": (a, b)}, 4)
    assert "does not have" in refused(folder, mixture)


def test_files_that_are_no_adapters_are_refused(
    tmp_path: Path, base: Path, config: ModelConfig, changes: Changes
) -> None:
    assert "adapter_config.json is missing" in refused(base, config)
    folder = write_peft(tmp_path / "a", changes, 4)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "pickle" in refused(folder, config)
    (folder / "adapter_model.bin").unlink()
    assert "lacks adapter_model.safetensors" in refused(folder, config)
    other = write_gguf(tmp_path / "other.gguf", changes, 4, heads(config), arch="qwen3")
    assert "a model of architecture 'qwen3', and this is a llama model" in refused(other, config)
    (folder / "adapter_config.json").write_text(json.dumps([]), encoding="utf-8")
    assert "should hold a JSON object" in refused(folder, config)
