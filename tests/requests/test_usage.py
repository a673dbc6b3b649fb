"""Seconds in an answer's usage: its prefill, and the steps that gave it tokens; on a CPU, and on a GPU that is late."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polarlm.engine import Engine, SamplingParams, Usage
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.model.decoder import PromptRows
from polarlm.engine.model.forward import Transformer
from polarlm.engine.outputs import fold
from tests.cpu import CpuOps
from tests.requests.test_steps_ahead import SETTINGS, Ahead, drawn
from tests.tiny import EOS, load_tiny

PROMPT = list(range(5, 65))
UNITS = 8  # units of 16 tokens, in two layers


@pytest.fixture
def timed(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine with a simulated clock: a unit of a prefill takes 2 s, a step 1 s, all else no time."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(CpuOps, "prefill_rows", 16)
    for part, name, seconds in ((PromptRows, "project", 2.0), (Transformer, "step", 1.0)):
        work = getattr(part, name)

        def run(*given, work=work, seconds=seconds):
            now[0] += seconds
            return work(*given)

        monkeypatch.setattr(part, name, run)
    return tiny


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
def test_usage_counts_the_last_unit(timed: Engine, tokens: int) -> None:
    usage = timed.generate(PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True)).usage
    steps = max(0, tokens - 1)
    assert usage == Usage(len(PROMPT), 0, tokens, 2.0 * UNITS, 1.0 * steps)
    assert usage.prompt_rate == len(PROMPT) / (2 * UNITS)
    assert usage.generation_rate == (1 if steps else 0)


@pytest.mark.parametrize(("tokens", "steps"), [(0, 0), (1, 0), (2, 1), (4, 3)])
def test_usage_does_not_count_a_step_that_gives_only_the_end(timed: Engine, tokens: int, steps: int) -> None:
    params = SamplingParams(temperature=0, min_tokens=tokens, logit_bias={EOS[0]: 1e5})
    usage = timed.generate(PROMPT, params).usage
    assert usage == Usage(len(PROMPT), 0, tokens, 2.0 * UNITS, 1.0 * steps)


def test_the_step_that_computes_a_short_prompt_is_its_prefill(timed: Engine) -> None:
    usage = timed.generate(PROMPT[:5], SamplingParams(max_tokens=4, ignore_eos=True)).usage
    assert usage == Usage(5, 0, 4, 1.0, 3.0)


class Late(Ahead):
    """A GPU with a simulated clock, on which launches take no time of the host, and results are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.free = 0.0  # the host's time, and when the device has done all its work

    def works(self, seconds: float) -> None:
        self.free = max(self.free, self.now) + seconds

    def run_graph(self, key, work, inputs):
        self.works(1.0)
        return super().run_graph(key, work, inputs)

    def fetch_tokens(self, *args):
        self.now = max(self.now, self.free)
        return super().fetch_tokens(*args)

    def fetch_later(self, *args):
        fetch, end = super().fetch_later(*args), self.free

        def wait():
            self.now = max(self.now, end)
            return fetch.wait()

        return type(fetch)(fetch.ids, wait)


@pytest.mark.parametrize("others", [0, 1])
def test_what_a_gpu_computes_late_is_counted_where_it_belongs(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """A prompt of eight units of two seconds, between which steps of one second run."""
    ops, layer = Late(), PromptRows.project
    monkeypatch.setattr("time.perf_counter", lambda: ops.now)
    monkeypatch.setattr(NumpyOps, "prefill_rows", 16)
    monkeypatch.setattr(PromptRows, "project", lambda *given: ops.works(2.0) or layer(*given))
    with load_tiny(tiny_path, ops=ops, **SETTINGS) as engine:
        short, long = [], []
        for _ in range(others):
            engine.submit([5, 6, 7], drawn(max_tokens=30), into=short)
        for _ in range(4):
            engine.work()
        engine.submit(PROMPT, drawn(max_tokens=5), into=long)
        while engine.work():
            pass
        assert replace(fold(long).usage, queue_seconds=0.0) == Usage(len(PROMPT), 0, 5, 2.0 * UNITS, 4.0)
        if others:
            assert replace(fold(short).usage, queue_seconds=0.0) == Usage(3, 0, 30, 1.0, 29.0)
            assert ops.now == 2 * UNITS + 30  # the device was never idle, and steps have both
