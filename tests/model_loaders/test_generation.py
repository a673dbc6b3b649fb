"""What a model's files say about sampling."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polarlm.model_loaders.chat import generation
from polarlm.model_loaders.config import GenerationDefaults
from polarlm.model_loaders.fields import describe
from polarlm.model_loaders.files.gguf_file import Strings

Case = tuple[dict[str, object] | None, dict[str, Any]]  # what the file says, and what it means
CASES: list[Case] = [
    (None, {}),
    ({"eos_token_id": 2}, {}),
    (
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1},
        {"sampling": {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.1}},
    ),
    ({"do_sample": False}, {"greedy": True}),
    ({"do_sample": False, "temperature": 0.7}, {"sampling": {"temperature": 0.7}}),
    ({"temperature": None, "top_k": 0, "top_p": None}, {"sampling": {"top_k": 0}}),
    ({"top_k": -1, "suppress_tokens": [3, 99]}, {"sampling": {"top_k": 0}, "banned": (3, 99)}),
    ({"suppress_tokens": 3, "begin_suppress_tokens": [0]}, {"banned": (3,), "banned_first": (0,)}),
    ({"bad_words_ids": [[5], [2], [6, 7, 8]], "eos_token_id": [2]}, {"banned": (5,), "banned_sequences": ((6, 7, 8),)}),
]


def test_generation_defaults(tmp_path: Path) -> None:
    for written, expected in CASES:
        if written is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(written))
        assert generation.defaults_of_folder(tmp_path, 100) == GenerationDefaults(**expected), written


ODD: list[tuple[str, object, dict[str, Any]]] = [  # key, value, and what is kept of it
    *((key, value, {}) for key in ("temperature", "repetition_penalty") for value in ("1", {}, True, -1, math.nan)),
    *(("top_p", value, {}) for value in (0, 1e9)),
    *(("top_k", value, {}) for value in (-2, "40", 1.5, True)),
    ("do_sample", "false", {}),
    *(("suppress_tokens", value, {}) for value in ("3", {"3": 1}, [[3]], [-1], [100])),
    ("suppress_tokens", [3, "4", None, 7], {"banned": (3, 7)}),
    ("begin_suppress_tokens", [3, True, 10**30], {"banned_first": (3,)}),
    ("bad_words_ids", [[], [5], 6, [7, 100], [8, 9], [[1]]], {"banned": (5,), "banned_sequences": ((8, 9),)}),
]


def test_an_odd_value_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for key, value, kept in ODD:
        caplog.clear()
        (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
        assert generation.defaults_of_folder(tmp_path, 100) == GenerationDefaults(**kept)
        (record,) = caplog.records
        assert f"generation_config.json: {key} is {describe(value)}," in record.getMessage()
        assert "left out" in record.getMessage()


def test_a_gguf_file_has_sampling_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    says = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "tokenizer.ggml.suppress_tokens": [7, 999]}
    gguf: Any = SimpleNamespace(path=tmp_path / "a.gguf", metadata=says)
    assert generation.defaults_of_gguf(gguf, 100) == GenerationDefaults({"temperature": 0.5, "top_k": 20}, banned=(7,))
    assert not any("no defaults" in message for message in caplog.messages)
    says["general.sampling.xtc_probability"] = 0.5
    assert generation.defaults_of_gguf(gguf, 100).sampling == {"temperature": 0.5, "top_k": 20}
    assert "general.sampling.xtc_probability: these are no defaults here" in caplog.messages[-2]


def test_a_value_in_a_sentence_is_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = {"__type": "AddedToken", "content": "</s>", "special": True}
    values = (7, True, "x" * 90, token, {"a": [1] * 90, "b": None}, {}, [1, [2]], [token], range(1500))
    words = ["7", "True", f"'{'x' * 56}...", "the token '</s>'", "an object with 'a', 'b'", "an empty object"]
    words += ["[1, [2]]", "a list of 1 value", "a list of 1,500 values"]
    assert [describe(value) for value in values] == words
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, token], "suppress_tokens": token}))
    generation.defaults_of_folder(tmp_path, 100)
    said = [message.partition(": ")[2] for message in caplog.messages]
    assert said == [
        "eos_token_id is a list of 2 values, and of it the token '</s>' is left out: the model's tokens are 0 to 99.",
        "suppress_tokens is the token '</s>', and is left out: the model's tokens are 0 to 99.",
    ]
    gguf: Any = SimpleNamespace(path="m.gguf", metadata={"general.sampling.temp": Strings(b"", np.zeros(12, np.int64))})
    generation.defaults_of_gguf(gguf, 100)
    assert "temp is a list of 12 values, but must be a number" in caplog.messages[-1]
