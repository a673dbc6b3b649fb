"""Recorded steps give what the same ops give one by one."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.backends.native.graphs import Graphs
from polarlm.engine.backends.native.launch import Launcher, Recording
from polarlm.engine.backends.native.product_ops.products import LinearOps
from polarlm.engine.backends.ops import Fusion
from polarlm.engine.jit.compile.library import Library
from polarlm.engine.jit.lang import Kernel
from polarlm.engine.weight_formats import Linear
from tests import weights


class Model:
    """Two products with a norm and an activation between them."""

    def __init__(self, launch: Launcher, format: str = "q4_1") -> None:
        rng = np.random.default_rng(0)
        self.ops = LinearOps(launch)
        both, out = (weights.random_matrix(rng, format, rows, columns) for rows, columns in ((128, 64), (64, 64)))
        self.both, self.out = Linear(self.ops.load([both])), Linear(self.ops.load([out]))
        self.norm = rng.standard_normal(64).astype(np.float32), 1e-5
        self.calls = 0

    def forward(self, x: np.ndarray) -> np.ndarray:
        self.calls += 1
        y = self.ops.linear(x, self.both, Fusion(self.norm, "silu"))
        return self.ops.linear(y, self.out, residual=x)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_recording_follows_its_inputs(threads: int) -> None:
    launch = Launcher(threads)
    model, graphs = Model(launch), Graphs(launch)
    rng = np.random.default_rng(1)
    model.forward(rng.standard_normal((3, 64)).astype(np.float32))
    launch.library.wait([*launch.library._futures])
    model.calls = 0
    for rows in (1, 3, 1, 3):
        x = rng.standard_normal((rows, 64)).astype(np.float32)
        recorded = graphs.run("step", model.forward, [x]).copy()
        np.testing.assert_array_equal(recorded, model.forward(x.copy()))
    assert model.calls == 4 + 2  # the recorded function is called once for each shape


@pytest.mark.parametrize("format", ["q4_1", "f16"])
def test_other_kernels_serve_until_those_for_as_many_rows_are_compiled(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the step is recorded anew, and its results are equal."""
    launch = Launcher(2)
    model, graphs = Model(launch, format), Graphs(launch)
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)

    def run(rows: int) -> tuple[np.ndarray, Recording]:
        result = graphs.run("step", model.forward, [x[:rows]]).copy()
        return result, next(reversed(graphs._recordings.values()))[1]

    def kernels(recording: Recording) -> set[Kernel]:
        return {launch.kernel for part in recording.parts for launch in part.launches}

    single = kernels(run(1)[1])
    with monkeypatch.context() as patch:
        patch.setattr(Library, "has", lambda library, kernel: kernel in single)
        meanwhile, recording = run(8)
        assert kernels(recording) <= single
        assert run(8)[1] is recording
    launch.library.wait(recording.wanted)
    result, recorded_anew = run(8)
    assert kernels(recorded_anew) >= set(recording.wanted)
    assert not recorded_anew.wanted
    np.testing.assert_array_equal(result, meanwhile)


def test_a_recorded_step_gives_back_what_a_prompt_took() -> None:
    """Unless the prompt is under way: then some of it is in use."""
    launch = Launcher(1)
    model, graphs = Model(launch), Graphs(launch)
    x = np.ones((1, 64), np.float32)

    hidden = launch.empty((50_000, 64))
    graphs.run("step", model.forward, [x])
    assert launch._buffers.nbytes > 0
    del hidden
    graphs.run("step", model.forward, [x])
    assert launch._buffers.nbytes == 0


def test_a_step_with_an_op_outside_runs_op_by_op() -> None:
    launch = Launcher(1)
    model, graphs = Model(launch), Graphs(launch)

    def work(x: np.ndarray) -> np.ndarray:
        return launch.run_numpy(lambda y: y / 2, model.forward(x))

    x = np.ones((1, 64), np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(graphs.run("step", work, [x.copy()]), model.forward(x.copy()) / 2)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_call_between_launches_is_made_at_each_replay(threads: int) -> None:
    """It reads what the launches before it wrote, and its arrays do not keep the recording's memory from others."""
    launch = Launcher(threads)
    model, graphs, seen = Model(launch), Graphs(launch), list[float]()

    def double(x: np.ndarray) -> None:
        seen.append(float(x.sum()))
        x *= 2

    def work(x: np.ndarray) -> np.ndarray:
        for _ in range(3):
            y = model.forward(x)
            launch.call(double, y)
        return y

    for value in (1, 2, 3):
        x = np.full((1, 64), value, np.float32)
        expected = work(x.copy())
        before = len(seen)
        np.testing.assert_array_equal(graphs.run("step", work, [x.copy()]), expected)
        assert seen[before:] == seen[before - 3 : before]
    fixed, recording = next(entry for entry in graphs._recordings.values() if entry is not None)
    second = launch.record()
    with second as alone:
        model.forward(fixed[0])
    assert recording.buffers.nbytes == alone.buffers.nbytes
