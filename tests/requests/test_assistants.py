"""Assistants of Gemma 4: what they draft, and that answers stay the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from polarlm import EngineError
from polarlm.model_loaders.files.draft_heads import head_beside
from tests.conftest import FIXTURES
from tests.requests.drafters import BACKENDS, PARAMS, guesses, prompts, summary
from tests.requests.drafters import SETTINGS as BASE
from tests.tiny import load_tiny, make_model

SETTINGS = BASE | {"spec_type": "assistant"}
ASSISTANTS = FIXTURES.parent / "assistants"
WINDOW = 12  # of both models
NAMES = ["gemma4_shared_kv", "gemma4_values_are_keys"]


def with_assistant(folder: Path, fixture: str = NAMES[0]) -> tuple[Path, Path]:
    """A model, and its assistant in a folder inside it."""
    model = make_model(folder, fixture)
    return model, shutil.copytree(ASSISTANTS / fixture, folder / "assistant")


@BACKENDS
@pytest.mark.parametrize("name", NAMES)
def test_it_drafts_what_transformers_drafts(name: str, backend: Callable[[], Any], tmp_path: Path) -> None:
    """After prompts, and after steps of one token, at every other place, but where a block begins. Left out are places
    where two tokens are as good as equal, and where the first token that the window shows is in a block that has left
    it."""
    reference = np.load(ASSISTANTS / name / "reference.npz")
    ids, sure = reference["ids"].tolist(), 0
    model, _ = with_assistant(tmp_path, name)
    with load_tiny(model, ops=backend(), **SETTINGS, cache_type="f16") as engine:
        for (place, *wanted), margin in zip(reference["drafts"].tolist()[::2], reference["margins"][::2], strict=True):
            if place % 16 == 0:
                assert guesses(engine, ids[: place + 1], place, 4) == []
            elif margin > 0.02 and (place - WINDOW) % 16 != 15:
                for begun in {max(1, place - place % 4), place}:
                    found = guesses(engine, ids[: place + 1], begun, 4)
                    assert found == wanted[: 16 - place % 16]
                sure += 1
    assert sure > 20


def test_requests_are_drafted_for_with_the_assistants_own_tokens(tmp_path: Path) -> None:
    """From the path that is given, with nothing beside the model; and a request may say that it wants none."""
    model, assistant = with_assistant(tmp_path)
    elsewhere = shutil.move(assistant, tmp_path.with_name(f"{tmp_path.name} elsewhere"))
    with load_tiny(model, **SETTINGS, model_draft=str(elsewhere)) as engine:
        answers = [engine.generate(prompts(1)[0], replace(PARAMS, spec_type=kind)) for kind in (None, "none")]
        assert summary(answers[0]) == summary(answers[1])
        assert answers[0].usage.drafted_tokens > 0 == answers[1].usage.drafted_tokens
        with pytest.raises(EngineError, match="load the engine with spec_type=eagle3"):
            engine.generate([5, 6], replace(PARAMS, spec_type="eagle3"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"backbone_hidden_size": 48},
            "is for a Gemma 4 with hidden states of 48 numbers.* the assistant of this model",
        ),
        ({"vocab_size": 95}, r"95 tokens, .* give the assistant of this model"),
        ({"sliding_window": 13}, r"keys and values of its own shapes; give the assistant of this model"),
        ({"head_dim": 8}, r"keys and values of its own shapes"),
        ({"hidden_size_per_layer_input": 4}, "hidden_size_per_layer_input is 4, but only 0 is supported"),
        ({"enable_moe_block": True}, "enable_moe_block is True, but only False is supported"),
        ({"intermediate_size": 32}, r"gate_proj.* has the shape"),
        ({"model_type": "gemma4"}, "describes no assistant of Gemma 4"),
    ],
)
def test_assistants_of_another_model_or_kind_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    model, assistant = with_assistant(tmp_path)
    config = json.loads((assistant / "config.json").read_text())
    (key, value), *_ = change.items()
    (config if key in config else config["text_config"])[key] = value
    (assistant / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=says):
        load_tiny(model, **SETTINGS, model_draft=str(assistant))


def test_what_is_not_there_or_not_an_assistant_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no assistant of Gemma 4 beside .*; give one with model_draft"):
        load_tiny(make_model(tmp_path, NAMES[0]), **SETTINGS)
    model, assistant = with_assistant(tmp_path)
    assert head_beside("assistant", tmp_path / "model.gguf") == assistant
    (tmp_path / "assistant.gguf").touch()
    with pytest.raises(EngineError, match=r"is no folder: give an assistant's folder"):
        load_tiny(model, **SETTINGS, model_draft=str(tmp_path / "assistant.gguf"))
    (tmp_path / "assistant.gguf").unlink()
    tensors = load_file(assistant / "model.safetensors")
    save_file(
        tensors | {"model.layers.3.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}, assistant / "model.safetensors"
    )
    with pytest.raises(EngineError, match=r"layers.3.* which an assistant does not have"):
        load_tiny(model, **SETTINGS)
    save_file(
        {key: one for key, one in tensors.items() if key != "pre_projection.weight"}, assistant / "model.safetensors"
    )
    with pytest.raises(EngineError, match=r"lacks the tensor .*pre_projection.weight, which an assistant has"):
        load_tiny(model, **SETTINGS)
    other = make_model(tmp_path, "llama_gqa_linear")
    with pytest.raises(EngineError, match="is for a Gemma 4"):
        load_tiny(other, **SETTINGS, model_draft=str(shutil.copytree(ASSISTANTS / NAMES[0], tmp_path / "again")))
