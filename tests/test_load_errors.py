"""Models and settings that an engine cannot be loaded with: a sentence, where it can be before weights are read."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine, EngineConfig, EngineError, SamplingParams
from polarlm.engine.config import format_bytes
from polarlm.engine.loading import assembly
from tests.tiny import CONTEXT, assert_idle, make_model


def refusal(path: Any, **settings) -> tuple[EngineError, list[str]]:
    """The error of a load, and the sentences before it."""
    said: list[str] = []
    with pytest.raises(EngineError) as raised:
        Engine.load(path, verbose=said.append, **settings)
    return raised.value, said


THE_MODEL_CASES = [
    ({"cache_types": "f16"}, ["no setting 'cache_types'", "did you mean cache_type?"]),
    ({"tile_cache": "1G"}, ["no setting 'tile_cache'", "weights are packed at each start"]),
    ({"ctx_size": -1}, ["ctx_size=-1"]),
    ({"ctx_size": 1}, ["ctx_size=1", "a prompt and its answer take two tokens at least"]),
    ({"ctx_size": True}, ["ctx_size", "True", "int"]),
    ({"threads": -2}, ["threads=-2"]),
    ({"block_size": 6}, ["block_size", "6"]),
    ({"kept_sequences": -1}, ["kept_sequences", "-1"]),
    ({"kv_memory": "lots"}, ["kv_memory=lots"]),
    ({"kv_memory": 512}, ["kv_memory", "512", "str"]),
    ({"calibration": "no"}, ["calibration", "'no'", "bool"]),
    ({"cache_type_k": "q9"}, ["cache_type_k=q9", "polarquant"]),
    ({"cache_type_k": 4}, ["cache_type_k", "4"]),
    ({"device": "tpu"}, ["device=tpu"]),
]


def test_settings_are_checked_before_the_model() -> None:
    for settings, words in THE_MODEL_CASES:
        error, said = refusal(Path("nowhere"), **settings)
        assert all(word in str(error) for word in words), str(error)
        assert "--" not in str(error)
        assert said == []


def test_a_cache_type_that_cannot_serve_the_model_is_named_before_the_weights_are_read(tmp_path, monkeypatch) -> None:
    path = make_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    # The same matrices, cut into heads of half the size.
    config.update(head_dim=4, num_attention_heads=12, num_key_value_heads=4)
    (path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("polarlm.engine.loading.assembly.load_weights", lambda *_: pytest.fail("weights were read"))
    error, _ = refusal(path, device="cpu", cache_type_k="f16", cache_type_v="polarquant")
    assert all(word in str(error) for word in ("cache_type_v=polarquant", "head dimension", "4"))


def test_memory_limits_the_context(tiny_path: Path) -> None:
    with Engine.load(tiny_path, device="cpu", block_size=16, kv_memory="12K") as small:
        assert 16 <= small.context < CONTEXT
        answer = small.generate([7, 8, 9], SamplingParams(ignore_eos=True))
        assert 3 + len(answer.token_ids) == small.context
        for first in range(10, 16):  # kept sequences, for which there is little room
            assert (
                small.generate([first, 7], SamplingParams(max_tokens=9, ignore_eos=True)).usage.completion_tokens == 9
            )
        assert_idle(small)


def test_a_context_beyond_the_models_own_is_allowed_with_a_warning(tiny_path: Path) -> None:
    said: list[str] = []
    with Engine.load(tiny_path, device="cpu", ctx_size=CONTEXT + 44, verbose=said.append) as large:
        assert large.context == CONTEXT + 44
        assert any("context of 300 tokens" in line and "256" in line for line in said)
        assert (
            large.generate([7] * (CONTEXT + 20), SamplingParams(max_tokens=2, ignore_eos=True)).finish_reason
            == "length"
        )


def test_a_context_that_does_not_fit_is_reduced_with_a_warning(tiny_path: Path) -> None:
    said: list[str] = []
    settings = {"kv_memory": "12K", "ctx_size": CONTEXT, "block_size": 16}
    with Engine.load(tiny_path, device="cpu", **settings, verbose=said.append) as small:
        (warning,) = [line for line in said if line.startswith("warning: ")]
        assert f"of the {CONTEXT} tokens of context that were asked for, {small.context} fit" in warning


@pytest.mark.parametrize("context", [2, 5, 8, 9, 17])
def test_a_small_context_can_be_filled(tiny_path: Path, context: int) -> None:
    with Engine.load(tiny_path, device="cpu", ctx_size=context, block_size=16) as small:
        for _ in range(3):
            answer = small.generate([7], SamplingParams(ignore_eos=True))
            assert 1 + len(answer.token_ids) == context
        assert_idle(small)


def test_settings_override_the_config(tiny_path: Path) -> None:
    config = EngineConfig(ctx_size=100, device="cpu", weights="elsewhere")
    with Engine.load(tiny_path, config=config, ctx_size=60) as engine:
        assert (engine.context, engine.config.weights) == (60, str(tiny_path))


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("./none", "model_unavailable", "./none does not exist"),
        ("model.gguf", "model_unavailable", "not a GGUF file"),
        ("", "model_unavailable", "path is empty"),
        *((path, "invalid_request", repr(path)) for path in (123, ["model.gguf"], b"model.gguf")),
    ],
)
def test_what_is_no_model(path: Any, code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"no model")
    error, _ = refusal(path, device="cpu")
    assert error.code == code
    assert words in str(error)


@pytest.mark.parametrize("reads_in_a_thread", [True, False])
def test_a_tokenizer_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads_in_a_thread: bool
) -> None:
    """It is read while the weights are loaded, or before where the system refuses a thread."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if not reads_in_a_thread:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    folder = make_model(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    error, _ = refusal(folder, device="cpu")
    assert "tokenizer.json" in str(error)
    assert error.code == "model_unavailable"


def lacking(*arguments: object, **more: object) -> None:
    raise MemoryError


def test_memory_that_runs_out_is_named_with_what_is_needed(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(tiny_path, device="cpu", calibration=False) as engine:
        weights, store = engine._model.weights.bytes, engine._store.plan.bytes
    monkeypatch.setattr(assembly, "load_weights", lacking)
    monkeypatch.setattr(assembly, "warm_up_first", lambda *arguments: [])
    error, _ = refusal(tiny_path, device="cpu")
    assert error.code == "out_of_memory"
    assert f"its weights take {format_bytes(weights)}, its KV store {format_bytes(store)}." in str(error)
    for advice in ("ulimit -v", "ctx_size", "kv_memory"):
        assert advice in str(error)


def test_memory_that_runs_out_before_sizes_are_known_is_a_sentence(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly.model_loaders, "load", lacking)
    error, _ = refusal(tiny_path, device="cpu")
    assert error.code == "out_of_memory"
    assert f"There is not enough memory for {tiny_path.name}. End" in str(error)
