"""A model of a GGUF file, saved as a folder of BF16 safetensors."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polarlm import model_loaders
from polarlm.engine import Engine, SamplingParams
from polarlm.model_loaders import LoadError, Model
from scripts import save_as_folder
from scripts.make_random_model import write
from tests.random_model import TINY, tokenizer_file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .gguf file of BF16 weights."""
    folder = tmp_path_factory.mktemp("bf16")
    write(path := folder / "random-bf16.gguf", "random", TINY, "bf16", tokenizer_file(folder))
    return path


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a folder."""
    return save_as_folder.save_as_folder(model_loaders.load(file), tmp_path_factory.mktemp("folder"))


def values(model: Model, name: str) -> np.ndarray:
    found = np.empty(model.weights.shape(name), np.float32)
    model.weights.read_into(name, found)
    return found


def test_the_folder_has_the_weights_and_the_configuration_of_the_file(file: Path, folder: Path) -> None:
    one, other = (model_loaders.load(path) for path in (file, folder))
    assert one.dtype == other.dtype == "BF16"
    assert one.config == other.config
    assert set(one.weights.names()) == set(other.weights.names())
    for name in one.weights.names():
        np.testing.assert_array_equal(values(one, name), values(other, name), strict=True)


@pytest.mark.parametrize("text", ["the other 12 things", "<|im_start|>user\nä\n"])
def test_its_tokenizer_is_that_of_the_file(text: str, file: Path, folder: Path) -> None:
    one, other = (model_loaders.load(path).tokenizer for path in (file, folder))
    assert one.tokenize(text, control=True) == other.tokenize(text, control=True)
    assert (one.bos_id, one.eos_ids, one.vocab_size) == (other.bos_id, other.eos_ids, other.vocab_size)


def test_the_engine_says_the_same_from_both(file: Path, folder: Path) -> None:
    said = []
    for path in (file, folder):
        with Engine.load(path, device="cpu", cache_type="f16", ctx_size=128) as engine:
            said.append(engine.generate("the other", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)).text)
    assert said[0] == said[1] != ""


def test_another_family_is_refused(tmp_path: Path) -> None:
    shape = replace(TINY, arch="qwen2", qkv_bias=True)
    write(path := tmp_path / "q.gguf", "q", shape, "bf16", tokenizer_file(tmp_path))
    with pytest.raises(LoadError, match="is of the family qwen2, and only llama"):
        save_as_folder.save_as_folder(model_loaders.load(path), tmp_path)


def test_an_existing_folder_is_left_alone(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["save_as_folder", str(file), str(tmp_path)])
    assert save_as_folder.main() == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert not list(tmp_path.iterdir())
