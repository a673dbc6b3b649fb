"""Ctrl-C in a step: the command buffer that runs is completed, and what comes afterwards is right."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.native import graphs, launch
from polarlm.engine.backends.native.graphs import Graphs
from polarlm.engine.backends.native.launch import Launcher
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, Value, vector
from polarlm.engine.jit.run import buffers, workers
from tests.jit.levels import declared

FILES = {module.__file__ for module in (buffers, graphs, launch, workers)}


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an array that was never made
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
