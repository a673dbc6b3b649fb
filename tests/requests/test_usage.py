"""Seconds in an answer's usage: its prefill, and the steps that gave it tokens."""

from __future__ import annotations

import pytest

from polarlm.engine import Engine, SamplingParams, Usage
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.prefill import Prefill
from tests.cpu import CpuOps
from tests.tiny import EOS

PROMPT = list(range(5, 65))
UNITS = 8  # units of 16 tokens, in two layers


@pytest.fixture
def timed(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine with a simulated clock: a unit of a prefill takes 2 s, a step 1 s, all else no time."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(CpuOps, "prefill_rows", 16)
    for part, name, seconds in ((Prefill, "_layer", 2.0), (Transformer, "step", 1.0)):
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
