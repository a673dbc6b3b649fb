"""Prompts whose launches are not waited for give what they give without: with several threads, and with one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Completion, PromptOptions, SamplingParams
from polarlm.engine.backends.native.launch import Launcher
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.jit.lang.records import address
from polarlm.engine.jit.run.workers import CommandBuffer, Launch, Workers
from polarlm.engine.outputs import fold
from tests.tiny import VOCABULARY, assert_idle, load_tiny, make_model

FAMILIES = [
    "llama_gqa_linear",  # buffers of several prompts, which NumPy fills
    "gemma3_tied",
    "lfm2_biases",  # short convolutions, whose inputs NumPy copies
    "qwen3_5_tied",
    "nemotron_h_latent",
    "deepseek_v3_yarn",
    "qwen2_moe_shared",
]
SETTINGS: dict[str, Any] = {"block_size": 16, "ctx_size": 512, "calibration": False, "parallel": 4}
SOME = SamplingParams(max_tokens=3, temperature=0, logprobs=2, ignore_eos=True)


@pytest.fixture(autouse=True, params=[40, 400], ids=["chunks_of_a_layer", "layers_together"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeOps, "prefill_rows", request.param, raising=False)


def answers(path: Path, threads: int, **more: Any) -> list[Completion]:
    """To a prompt of several chunks, to another that continues it, and to four at the same time."""
    rng, given = np.random.default_rng(1), list[Sequence[int]]()
    for count in (200, 60, 30, 25, 90, 9):
        given.append(rng.integers(5, VOCABULARY, count).tolist())
    with load_tiny(path, threads=threads, **SETTINGS, **more) as engine:
        found = [engine.generate(given[0], SOME), engine.generate([*given[0], *given[1]], SOME)]
        trays: list[list[Any]] = [[] for _ in given[2:]]
        for ids, tray in zip(given[2:], trays, strict=True):
            engine.submit(ids, SOME, PromptOptions(), into=tray)
        while engine.work():
            pass
        assert_idle(engine)
        return [*found, *map(fold, trays)]


def contents(found: Sequence[Completion]) -> list[object]:
    return [(one.token_ids, one.logprobs) for one in found]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[CommandBuffer]:
    """Nothing of a stream is computed before it is waited for: what is read too early is always wrong. Returns all that
    was computed so."""
    computed, waiting = list[CommandBuffer](), list[CommandBuffer]()

    def add(self: Workers, commands: CommandBuffer, *_: int) -> None:
        one = CommandBuffer([])
        one._table = commands._table.copy()
        one.units, one.address = one._table[2 :: len(Launch._fields)], address(one._table)
        waiting.append(one)

    def finish(self: Workers, owner: int) -> None:
        for commands in waiting:
            self.run(commands, 2)
        computed.extend(waiting)
        waiting.clear()

    for name, function in (("begin", add), ("add", add), ("finish", finish)):
        monkeypatch.setattr(Workers, name, function)
    return computed


@pytest.mark.parametrize("model", FAMILIES)
def test_answers_are_the_same_to_the_bit(tmp_path: Path, late: list[CommandBuffer], model: str) -> None:
    path = make_model(tmp_path, model)
    wanted = answers(path, 1)
    assert not late
    assert contents(answers(path, 3)) == contents(wanted)
    assert late


def test_calls_between_launches_write_what_these_have_read(tmp_path: Path, late: list[CommandBuffer]) -> None:
    """Experts that are read when they are chosen take the places of others, and so do their biases."""
    path, settings = make_model(tmp_path, "gpt_oss_transposed"), {"expert_cache": "100K", "weight_type": "f32"}
    assert contents(answers(path, 3, **settings)) == contents(answers(path, 1, weight_type="f32"))
    assert late


def test_an_error_in_a_layer_ends_what_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, linear = make_model(tmp_path), NativeOps.linear
    with load_tiny(path, threads=2, **SETTINGS) as engine:
        wanted = engine.generate([5, 6, 7] * 40, SOME)

        def fails(self: NativeOps, x: np.ndarray, *arguments: Any, **more: Any) -> np.ndarray:
            if self._launch._entries > 3:
                raise KeyboardInterrupt
            return linear(self, x, *arguments, **more)

        monkeypatch.setattr(NativeOps, "linear", fails)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([5, 6, 7] * 40, SOME, PromptOptions(cache_prompt=False))
        monkeypatch.undo()
        assert engine.generate([5, 6, 7] * 40, SOME, PromptOptions(cache_prompt=False)).logprobs == wanted.logprobs
        assert_idle(engine)


def test_more_launches_than_a_run_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polarlm.engine.backends.native.launch.MOST_ENTRIES", 4)
    path = make_model(tmp_path)
    assert contents(answers(path, 2)) == contents(answers(path, 1))


def test_python_reads_what_has_been_computed() -> None:
    """`finish` and ops of NumPy wait; nothing is held afterwards."""
    ops = NativeOps(2)
    launch: Launcher = ops._launch
    x, y = np.full((300, 64), 2, np.float32), np.full((300, 64), 3, np.float32)
    with ops.stream():
        for _ in range(20):
            ops.scale(x, np.full(1, 0.5, np.float32))
            ops.scale(x, np.full(1, 2, np.float32))
        ops.assign(y, x)
        assert (y == 2).all()
        assert not launch._held
        ops.scale(x, np.full(1, 4, np.float32))
        launch.finish()
        assert (x == 8).all()
