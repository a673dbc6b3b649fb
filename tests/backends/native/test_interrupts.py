"""Ctrl-C in a step: the command buffer that runs is completed, and what comes afterwards is right."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.backends.native import graphs, launch
from polarlm.engine.backends.native.graphs import Graphs
from polarlm.engine.backends.native.launch import Launcher
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, Value, vector
from polarlm.engine.jit.run import buffers, workers
from polarlm.engine.jit.run.workers import Workers
from tests.jit.levels import declared
from tests.tiny import assert_idle, load_tiny

FILES = {module.__file__ for module in (buffers, graphs, launch, workers)}
PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def emit_add(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
    """y = x + 1, units of 16 numbers."""
    with e.loop(begin, end) as unit:
        e.store(e.load(args.x + unit * 64, vector(F32, 16)) + 1.0, args.y + unit * 64)


ADD = Kernel("test_add", emit_add, declared("x y"))


def interrupted(line: int, work: Callable[[], object]) -> bool:
    """Call `work`, with a KeyboardInterrupt before this line of those that it runs in FILES → whether it got there."""
    lines, came = itertools.count(), False

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal came
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name == "__del__":  # where it would be ignored
            return None
        if event == "line" and next(lines) == line:
            came = True
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        assert came
    finally:
        sys.settrace(before)
    return came


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of an array that was never made
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_step_interrupted_at_any_line_is_right_the_next_time(is_recorded: bool) -> None:
    """While it is recorded, or run again."""
    launcher = Launcher(2)

    def add_two(x: np.ndarray) -> np.ndarray:
        rows, first, second = len(x), launcher.empty(x.shape), launcher.empty(x.shape)
        launcher(ADD, rows, ADD.arguments(x=x, y=first))
        launcher(ADD, lambda: rows, ADD.arguments(x=first, y=second))
        return second

    for line in itertools.count():
        steps, x = Graphs(launcher), np.zeros((5, 16), np.float32)
        if is_recorded:
            steps.run("step", add_two, [x])
        came = interrupted(line, lambda steps=steps, x=x: steps.run("step", add_two, [x]))
        for value in (3.0, 4.0):
            x = np.full((5, 16), value, np.float32)
            np.testing.assert_array_equal(steps.run("step", add_two, [x]), x + 2, f"recorded, line {line}")
            np.testing.assert_array_equal(add_two(x), x + 2, f"line {line}")
        if not came:
            break
    assert line > 10


@pytest.mark.slow
@pytest.mark.parametrize("cache_type", ["f16", "ring4"])
def test_an_engine_interrupted_after_a_tape_answers_as_before(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    run, left = Workers.run, -1

    def interrupting(self: Workers, *args: Any) -> None:
        nonlocal left
        run(self, *args)
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    def answer(engine: Engine) -> list[int]:
        return engine.generate(list(range(5, 65)), PARAMS).token_ids

    with load_tiny(tiny_path, ops=NativeOps(2), cache_type=cache_type, block_size=32, calibration=False) as engine:
        alone = answer(engine)
        monkeypatch.setattr(Workers, "run", interrupting)
        for runs in (1, 2, 3, 5, 8, 13, 21):  # of the kernels of a prompt, and then of steps
            left = runs
            with pytest.raises(KeyboardInterrupt):
                answer(engine)
            assert answer(engine) == alone
        assert_idle(engine)
