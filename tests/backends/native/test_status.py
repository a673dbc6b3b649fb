"""What an engine with compiled kernels says of itself: its level, its threads, and what runs in NumPy instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.backends.native.thread_count import thread_count
from polarlm.engine.chat import session
from polarlm.engine.errors import EngineError
from polarlm.engine.jit.compile.target import VARIABLE, best, levels
from tests.random_model import random_model

MINMAX = "polarpair-m4n4+minmax"  # no kernel reads it


def test_it_names_level_threads_and_kernels(tiny_path: Path) -> None:
    settings = {"device": "cpu", "block_size": 32, "calibration": False, "threads": 2, "cache_type": "f16"}
    with Engine.load(tiny_path, **settings) as engine:
        engine.generate([7, 8, 9], SamplingParams(max_tokens=3, ignore_eos=True))
        threads, line, names = engine.status().threads, session.cpu(engine), session.kernels(engine)
        assert "F16 weights as stored," in engine.fit_line()
    assert threads.number == thread_count(2).number  # two, if there are two CPUs
    assert threads.why.endswith(f"kernels compiled for {best().name}, inputs of 16 bits")
    assert line is not None
    assert best().name in line
    heading, *kinds = names.splitlines()
    assert heading == "Compiled kernels:"
    assert any(line.startswith("  product ") and "f16_1, " in line for line in kinds)
    assert any(line.startswith("  attention ") for line in kinds)


def test_it_names_inputs_of_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the level has instructions for it; else a sentence says that there are none."""
    path, said = random_model(tmp_path), []
    for level in {bool(level.most_code): level for level in levels()}.values():
        monkeypatch.setenv(VARIABLE, level.name)
        with Engine.load(path, device="cpu", calibration=False, input_bits=8, verbose=said.append) as engine:
            line, threads = engine.fit_line(), engine.status().threads
        wanted = "inputs of 8 bits" if level.most_code else "inputs of 16 bits"
        assert f"on the cpu, {wanted}" in line
        assert f"{level.name}, {wanted}" in threads.why
        assert any("input_bits has no effect here: " in sentence for sentence in said) is not bool(level.most_code)
        said.clear()
    with pytest.raises(EngineError, match="input_bits=4: choose from auto, 8, 16, bf16"):
        Engine.load(path, input_bits=4)


@pytest.mark.parametrize(
    ("k", "v", "clause"),
    [
        (MINMAX, "f16", f"attention and encoding in all layers, more slowly: no kernel reads {MINMAX}"),
        (f"{MINMAX}@1,ring4", "f16", f"attention and encoding in layer 1, more slowly: no kernel reads {MINMAX}"),
        ("polarpair-m4n4", "f16", "the encoding of keys in all layers, more slowly: no kernel encodes polarpair-m4n4"),
    ],
)
def test_it_names_what_runs_in_numpy(tiny_path: Path, k: str, v: str, clause: str) -> None:
    said: list[str] = []
    settings = {"device": "cpu", "block_size": 32, "calibration": False, "cache_type_k": k, "cache_type_v": v}
    with Engine.load(tiny_path, verbose=said.append, **settings) as engine:
        threads = engine.status().threads
    assert f"NumPy computes {clause}." in said
    assert threads.why.endswith(f"; NumPy computes {clause}")


def test_converted_weights_are_named(tiny_path: Path) -> None:
    with Engine.load(tiny_path, device="cpu", block_size=16, calibration=False, weight_type="bf16") as engine:
        assert "F16 weights converted to bf16," in engine.fit_line()
