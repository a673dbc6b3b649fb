"""The models that lie in the hub's cache, without the network."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from polarlm.model_loaders.hub import local

INDEX = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def keep(cache: Path, repo: str, *paths: str, commit: str = "1", main: str = "1", day: int = 1) -> Path:
    """A commit in the cache, whose files have their names as contents; a path with an ! is a link to nothing."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(main)
    snapshot = folder / "snapshots" / commit
    for path in paths:
        file = snapshot / path.rstrip("!")
        file.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith("!"):
            file.symlink_to(folder / "blobs" / "gone")
        else:
            file.write_text(INDEX if path.endswith("index.json") else path)
    os.utime(snapshot, (day, day))
    return snapshot


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["config.json", "model.safetensors", "README.md"], ["u/r"]),
        (["config.json", "model.safetensors.index.json", "one.safetensors", "two.safetensors"], ["u/r"]),
        (["config.json", "model.safetensors.index.json", "one.safetensors"], []),
        (["config.json", "model.safetensors.index.json", "one.safetensors", "two.safetensors!"], []),
        (["config.json", "model.safetensors!"], []),
        (["model.safetensors"], []),
        (["adapter_config.json", "adapter_model.safetensors"], []),
        (["m-Q8_0.gguf", "sub/m-Q4_K_M.gguf", "mmproj-m-F16.gguf", "config.json"], ["u/r:Q4_K_M", "u/r:Q8_0"]),
        (["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"], ["u/r:Q8_0"]),
        (["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf!"], []),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], ["u/r:a-Q8_0.gguf", "u/r:b-Q8_0.gguf"]),
        (["config.json", "model.safetensors", "m-Q8_0.gguf"], ["u/r", "u/r:Q8_0"]),
    ],
)
def test_complete_models_have_the_names_by_which_they_are_asked_for(
    cache: Path, paths: list[str], names: list[str]
) -> None:
    keep(cache, "u/r", *paths)
    assert [model.name for model in local.models()] == names


def test_an_entry_says_where_the_model_lies_and_what_it_takes(cache: Path) -> None:
    parts = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    snapshot = keep(cache, "u/r", "config.json", "model.safetensors", *parts)
    folder, gguf = local.models()
    assert (folder.path, folder.revision, folder.bytes) == (snapshot, "1", len("config.jsonmodel.safetensors"))
    assert folder.files == (snapshot / "config.json", snapshot / "model.safetensors")
    assert (gguf.path, gguf.files) == (snapshot / parts[0], tuple(snapshot / part for part in parts))


def test_of_several_commits_that_of_main_counts_then_the_newest_that_is_whole(cache: Path) -> None:
    keep(cache, "u/r", "m-Q8_0.gguf", "m-Q6_K.gguf", "m-Q4_0.gguf", commit="1", main="2", day=1)
    keep(cache, "u/r", "m-Q8_0.gguf", commit="2", main="2", day=2)
    keep(cache, "u/r", "m-Q8_0.gguf", "m-Q6_K.gguf", commit="3", main="2", day=3)
    assert [(model.name, model.revision) for model in local.models()] == [
        ("u/r:Q4_0", "1"),
        ("u/r:Q6_K", "3"),
        ("u/r:Q8_0", "2"),
    ]


def test_what_is_no_model_of_the_cache_is_passed_over(cache: Path) -> None:
    keep(cache, "a/whole", "m-Q8_0.gguf")
    keep(cache, "b/broken", "config.json", "model.safetensors.index.json")
    (cache / "models--b--broken" / "snapshots" / "1" / "model.safetensors.index.json").write_text("{")
    (cache / "datasets--c--d" / "snapshots" / "1").mkdir(parents=True)
    (cache / "models--e--f").write_text("")
    (cache / "models--g--h").mkdir()
    assert [model.name for model in local.models()] == ["a/whole:Q8_0"]


def test_without_a_cache_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "nothing"))
    assert local.models() == []
