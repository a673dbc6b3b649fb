"""EAGLE-3 heads: what they draft, and that answers stay the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from polarlm import EngineError
from polarlm.engine.cli.flags import parse
from polarlm.engine.config import EngineConfig
from polarlm.engine.loading.checks import settle
from tests.eagle3 import DRAFTED_IDS, HEADS, KV_HEADS, D, F, drafts, hidden_size, make_head, with_head
from tests.requests.drafters import BACKENDS, PARAMS, guesses, prompts
from tests.requests.drafters import SETTINGS as BASE
from tests.tiny import VOCABULARY, load_tiny, make_model

SETTINGS = BASE | {"spec_type": "eagle3"}


HEADS_OF = {
    "a vocabulary of its own": {"ids": DRAFTED_IDS},
    "the model's vocabulary": {},
    "the residual begins normed": {"norm_before_residual": True},
    "two hidden states": {"states": 2, "eagle_aux_hidden_state_layer_ids": [1, 2]},
}


@BACKENDS
@pytest.mark.parametrize("kind", HEADS_OF)
def test_it_drafts_what_its_formulas_say(kind: str, backend: Callable[[], Any], tmp_path: Path) -> None:
    """After prompts, and after steps of one token; a draft ends with its block. Places where the two likeliest tokens
    are as good as equal are left out."""
    model, head = with_head(tmp_path, **HEADS_OF[kind])
    sure, rng = 0, np.random.default_rng(1)
    with load_tiny(model, ops=backend(), **SETTINGS, cache_type="f16") as engine:
        for count in (2, 3, 10, 15, 30, 50):
            ids = rng.integers(5, VOCABULARY, count).tolist()
            wanted, margin = drafts(model, head, ids, 4)
            if margin < 0.02:
                continue
            for begun in {1, count // 2, count - 1}:
                found = guesses(engine, ids, begun, 4, VOCABULARY)
                assert found == wanted[: len(found)] != []
            sure += 1
    assert sure >= 4


def speculators(folder: Path, model: Path) -> Path:
    """The head of `make_head`, as the library speculators writes it."""
    make_head(folder, model, ids=DRAFTED_IDS)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    renamed["embed_tokens.weight"] = np.zeros((VOCABULARY, hidden_size(model)), np.float32)
    save_file(renamed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    own = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    layer = {key: value for key, value in config.items() if key not in (*own, "architectures")}
    outer = {key: config[key] for key in own} | {"speculators_model_type": "eagle3", "norm_before_residual": False}
    written = outer | {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def as_gguf(folder: Path, model: Path) -> Path:
    """The same as llama.cpp's converter writes it: heads whose RoPE pairs are neighbours, and absolute ids."""
    make_head(folder, model, ids=DRAFTED_IDS)
    tensors = load_file(folder / "model.safetensors")
    shutil.rmtree(folder)
    file = folder.with_name("eagle3-model.gguf")
    writer = gguf.GGUFWriter(file, "eagle3")
    writer.add_block_count(1)
    writer.add_vocab_size(VOCABULARY)
    writer.add_embedding_length(hidden_size(model))
    writer.add_feed_forward_length(F)
    writer.add_context_length(2048)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(D)
    writer.add_value_length(D)
    writer.add_rope_dimension_count(D)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("eagle3.extract_layers", [0, 1, 2])
    writer.add_uint32("eagle3.target_hidden_size", hidden_size(model))
    writer.add_bool("eagle3.norm_before_residual", False)
    names = {
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    }
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, value in tensors.items():
        if name == "t2d":
            continue
        if name == "d2t":
            value = value + np.arange(len(value))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = value.reshape(-1, 2, D // 2, value.shape[-1])
            value = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(value.shape)
        theirs = table.get_name(name.replace("midlayer", "model.layers.0"), try_suffixes=(".weight",))
        writer.add_tensor(names.get(name) or theirs or name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


FORMS: dict[str, Callable[[Path, Path], Path]] = {"speculators": speculators, "gguf": as_gguf}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", [True, False], ids=["given", "beside"])
def test_other_forms_of_files_have_the_same_head(form: str, given: bool, tmp_path: Path) -> None:
    """By its path, or found beside the model by what it is."""
    model, ids = make_model(tmp_path), prompts(1)[0][:12]
    wanted, margin = drafts(model, make_head(tmp_path / "elsewhere" / "plain", model, ids=DRAFTED_IDS), ids, 3)
    shutil.rmtree(tmp_path / "elsewhere")
    head = FORMS[form](tmp_path / "head", model)
    with load_tiny(model, **SETTINGS, cache_type="f16", model_draft=str(head) if given else None) as engine:
        assert guesses(engine, ids, 5, 3, VOCABULARY) == wanted
    assert margin > 0.02


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            r"before layers 1, 2, 3, and this model has 2; ",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight of shape .* 2 hidden states of 48 numbers"),
        ({"draft_vocab_size": None}, r"is no EAGLE-3 head: its configuration has no draft_vocab_size"),
        ({"num_hidden_layers": 2}, r"num_hidden_layers is 2, but only 1 is supported"),
        ({"norm_before_fc": True}, r"norm_before_fc is True, but only False is supported"),
        ({"intermediate_size": 32}, r"gate_proj.* has the shape"),
    ],
)
def test_heads_of_another_model_or_kind_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    model, head = with_head(tmp_path, ids=DRAFTED_IDS)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(EngineError, match=says):
        load_tiny(model, **SETTINGS, model_draft=str(head))


def test_tensors_that_no_head_has_are_not_ignored(tmp_path: Path) -> None:
    model, head = with_head(tmp_path, ids=DRAFTED_IDS)
    tensors = load_file(head / "model.safetensors")
    for name, value, says in (
        ("layers.1.mlp.up_proj.weight", np.zeros((2, 2), np.float32), "which an EAGLE-3 head does not have"),
        ("d2t", tensors["d2t"] + 90, "names tokens that the model has not"),
        ("d2t", tensors["d2t"].astype(np.float32), "must have integers"),
    ):
        save_file(tensors | {name: value}, head / "model.safetensors")
        with pytest.raises(EngineError, match=says):
            load_tiny(model, **SETTINGS)


@pytest.mark.parametrize(("theirs", "ours"), [("draft-eagle3", "eagle3"), ("draft-mtp", "mtp")])
def test_names_of_llama_cpp_mean_the_same(theirs: str, ours: str, tmp_path: Path) -> None:
    argv = ["--spec-type", theirs, "--spec-draft-model", "x"]
    (config,) = parse(argv, {"model": EngineConfig}, prog="polarlm", description="")
    assert (config.spec_type, config.model_draft) == (ours, "x")
    assert settle("model", None, {"spec_type": theirs}).spec_type == ours
    model, _ = with_head(tmp_path)
    with load_tiny(model, **SETTINGS) as engine:
        params = replace(PARAMS, spec_type=theirs, max_tokens=4)
        if ours == "eagle3":
            assert engine.generate([5, 6], params).usage.completion_tokens == 4
        else:
            with pytest.raises(EngineError, match="spec_type=mtp needs a layer"):
                engine.generate([5, 6], params)


def test_a_pickled_head_is_refused(tmp_path: Path) -> None:
    model, head = with_head(tmp_path)
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(EngineError, match="holds its weights as a pickle"):
        load_tiny(model, **SETTINGS)
