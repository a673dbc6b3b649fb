"""`Engine.load` raises EngineError for every model that it cannot load."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine, EngineError
from polarlm.engine.config import format_bytes
from polarlm.engine.loading import assembly
from tests.tiny import make_model


def refusal(path: Path | str) -> EngineError:
    with pytest.raises(EngineError) as caught:
        Engine.load(path, device="cpu")
    return caught.value


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
    error = refusal(path)
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
    error = refusal(folder)
    assert "tokenizer.json" in str(error)
    assert error.code == "model_unavailable"


def lacking(*arguments: object, **more: object) -> None:
    raise MemoryError


def test_memory_that_runs_out_is_named_with_what_is_needed(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(tiny_path, device="cpu", calibration=False) as engine:
        weights, store = engine._model.weights.bytes, engine._store.plan.bytes
    monkeypatch.setattr(assembly, "load_weights", lacking)
    monkeypatch.setattr(assembly, "warm_up_first", lambda *arguments: [])
    error = refusal(tiny_path)
    assert error.code == "out_of_memory"
    assert f"its weights take {format_bytes(weights)}, its KV store {format_bytes(store)}." in str(error)
    for advice in ("ulimit -v", "ctx_size", "kv_memory"):
        assert advice in str(error)


def test_memory_that_runs_out_before_sizes_are_known_is_a_sentence(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly.model_loaders, "load", lacking)
    error = refusal(tiny_path)
    assert error.code == "out_of_memory"
    assert f"There is not enough memory for {tiny_path.name}. End" in str(error)
