"""`polarlm fit`: its tables, its advice, its JSON, and what it says of wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from polarlm import fit
from polarlm.engine import Engine
from polarlm.engine.config import DEFAULT_CACHE_TYPE
from polarlm.engine.loading.fit import CACHE_TYPES
from polarlm.engine.model.weights import FileMatrix
from polarlm.engine.state.cache_types import PRESETS
from tests.adapters import random_changes, write_peft
from tests.model_loaders.hub_server import Hub, Repository

GIB = 1 << 30


@pytest.fixture
def memory(memory: Callable[[int], None]) -> Callable[[int], None]:
    memory(4 * GIB)
    return memory


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert fit.main(["--device", "cpu", *argv]) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    return json.loads(run(capsys, "--json", *argv))


def test_every_type_has_a_row(demo_path: Path, memory, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name, of the demonstration model; nothing is loaded."""
    monkeypatch.setattr(FileMatrix, "slabs", None)
    lines = run(capsys).splitlines()
    assert "8,192 tokens of context" in lines[0]
    assert "4.0 GiB of memory free" in lines[2]
    starts = [line.split()[0] for line in lines if line]
    for name in (*CACHE_TYPES, "as-stored", "q8_0", "q4_0", "f16", "mxfp4"):
        assert name in starts
    assert lines[-1].strip() == "polarlm chat --device cpu"


def test_json_has_all_of_it(tiny_path: Path, memory, capsys) -> None:
    result = as_json(capsys, str(tiny_path), "-c", "64,128")
    (device,) = result["devices"]
    assert device["device"] == "cpu"
    assert {one["weight_type"] for one in device["weights"]} >= {"as-stored", "q8_0", "f32"}
    caches = {one["cache_type"]: one for one in device["weights"][0]["caches"]}
    assert caches.keys() == set(CACHE_TYPES)
    assert [one["tokens"] for one in caches["balanced"]["contexts"]] == [64, 128]


def test_the_advised_command_loads_what_it_says(tiny_path: Path, memory, capsys) -> None:
    """In memory that is too small for the context that is asked for."""
    memory(1 << 20)
    result = as_json(capsys, str(tiny_path), "-c", "20000")
    settings = result["advice"]["settings"]
    assert settings.get("cache_type", DEFAULT_CACHE_TYPE) in PRESETS
    assert 64 < settings["ctx_size"] < 20_000
    assert result["command"].startswith(f"polarlm chat {tiny_path} ")
    assert f"--ctx-size {settings['ctx_size']}" in result["command"]
    with Engine.load(tiny_path, device="cpu", **settings) as engine:
        assert engine._store.plan.tokens == settings["ctx_size"]


def test_what_does_not_fit_says_by_how_much(demo_path: Path, memory, capsys) -> None:
    text = run(capsys, str(demo_path), "-c", "4096,9000000")
    assert "lacks" in text
    assert "trained on 8,192 tokens" in text
    memory(10 << 20)
    text = run(capsys, str(demo_path))
    assert "MiB too much" in text
    assert text.splitlines()[-1].startswith("This model does not fit here")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["{tmp}/none"], "{tmp}/none does not exist"),
        (["{tmp}"], "{tmp}"),
        (["-c", "4k"], "-c/--ctx-size: takes whole numbers above 0, separated by commas"),
        (["-c", "0"], "-c/--ctx-size: takes whole numbers above 0"),
        (["--weight-type", "q9"], "--weight-type q9: there is no such type"),
        (["--device", "tpu"], "--device tpu: there are auto, cpu and cuda, and GPUs"),
    ],
)
def test_wrong_input_is_answered_with_a_sentence(argv: list[str], sentence: str, tmp_path: Path, capsys) -> None:
    assert fit.main([word.format(tmp=tmp_path) for word in argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {sentence.format(tmp=tmp_path)}")
    assert "Traceback" not in printed.err


def test_files_of_the_hub_are_compared_without_fetching_them(
    hub: Hub, small_ggufs: dict[str, bytes], memory, capsys
) -> None:
    hub.repositories["user/tiny"] = Repository(small_ggufs)
    result = as_json(capsys, "hf:user/tiny")
    (device,) = result["devices"]
    sizes = {one["weight_type"]: one["bytes"] for one in device["weights"]}
    assert sorted(sizes.values()) == sorted(map(len, small_ggufs.values()))
    assert all(name.startswith("user/tiny:") for name in sizes)
    assert result["command"] == "polarlm chat user/tiny:Q8_0 --device cpu"
    memory((min(sizes.values()) + max(sizes.values())) // 2)
    smallest = min(sizes, key=lambda name: sizes[name])
    assert smallest in run(capsys, "hf:user/tiny")


def test_a_folder_of_the_hub_may_be_converted(hub: Hub, small_folder: dict[str, bytes], memory, capsys) -> None:
    hub.repositories["user/folder"] = Repository(small_folder)
    result = as_json(capsys, "hf:user/folder", "--weight-type", "q8_0")
    weights = result["devices"][0]["weights"]
    assert [one["weight_type"] for one in weights[:2]] == ["q8_0", "as-stored"]
    assert weights[1]["bytes"] == len(small_folder["model.safetensors"])
    assert not hub.ranges_of("model.safetensors")


def test_adapters_are_counted(tiny_path: Path, tmp_path: Path, memory, capsys) -> None:
    adapter = write_peft(tmp_path / "adapter", random_changes(tiny_path, 16, 0), 16)
    plain, more = as_json(capsys, str(tiny_path)), as_json(capsys, str(tiny_path), "--lora", f"mine={adapter}")
    counts = [one["devices"][0]["weights"][0]["bytes"] for one in (plain, more)]
    numbers = sum(a.size + b.size for a, b in random_changes(tiny_path, 16, 0).values())
    assert counts[1] - counts[0] > 4 * numbers
    assert f"--lora mine={adapter}" in more["command"]
