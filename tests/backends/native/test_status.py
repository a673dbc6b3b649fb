"""What an engine with compiled kernels says of itself: its level, its threads, and what runs in NumPy instead."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("llvmlite")

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.backends.native.thread_count import thread_count
from polarlm.engine.backends.select import select
from polarlm.engine.chat import session
from polarlm.engine.jit.compile.target import best
from polarlm.engine.loading import assembly


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "select", lambda device, threads, compiled=True: select(device, threads, compiled))


def stepped(path: Path, cache_type: str) -> Engine:
    engine = Engine.load(path, device="cpu", block_size=32, calibration=False, threads=2, cache_type=cache_type)
    engine.generate([7, 8, 9], SamplingParams(max_tokens=3, ignore_eos=True))
    return engine


@pytest.mark.parametrize(
    ("cache_type", "in_numpy"),
    [
        ("f16", ""),
        ("polarquant", ""),
        (
            "polarpair-m4n4/f16",
            "; NumPy computes the encoding of keys in all layers, more slowly: no kernel encodes polarpair-m4n4",
        ),
    ],
)
def test_it_names_level_and_threads(tiny_path: Path, cache_type: str, in_numpy: str) -> None:
    with stepped(tiny_path, cache_type=cache_type) as engine:
        threads = engine.status().threads
        line = session.cpu(engine)
    assert threads.number == thread_count(2).number  # two, if there are two CPUs
    assert best().name in threads.why
    assert threads.why.endswith(f"kernels compiled for {best().name}{in_numpy}")
    assert line is not None
    assert best().name in line


@pytest.mark.parametrize(
    ("k", "v", "layers", "codec"),
    [
        ("kivi4", "kivi4", "all layers", "kivi4"),
        ("kivi4", "f16", "all layers", "kivi4"),
        ("ring4", "kivi4@1,ring4", "layer 1", "kivi4"),
    ],
)
def test_it_names_what_runs_in_numpy(tiny_path: Path, k: str, v: str, layers: str, codec: str) -> None:
    said: list[str] = []
    settings = {"device": "cpu", "block_size": 32, "calibration": False, "cache_type_k": k, "cache_type_v": v}
    with Engine.load(tiny_path, verbose=said.append, **settings) as engine:
        threads = engine.status().threads
    clause = f"NumPy computes attention and encoding in {layers}, more slowly: no kernel reads {codec}"
    assert f"{clause}." in said
    assert threads.why.endswith(f"; {clause}")


def test_it_names_the_kernels(tiny_path: Path) -> None:
    with stepped(tiny_path, cache_type="f16") as engine:
        names = session.kernels(engine)
    heading, *kinds = names.splitlines()
    assert heading == "Compiled kernels:"
    assert any(line.startswith("  product ") and "f16_1, " in line for line in kinds)
    assert any(line.startswith("  attention ") for line in kinds)


def test_weights_that_stay_packed_are_as_stored(tiny_path: Path) -> None:
    with Engine.load(tiny_path, device="cpu", block_size=16, calibration=False) as engine:
        assert "F16 weights as stored," in engine.fit_line()
    with Engine.load(tiny_path, device="cpu", block_size=16, calibration=False, weight_type="bf16") as engine:
        assert "F16 weights converted to bf16," in engine.fit_line()
