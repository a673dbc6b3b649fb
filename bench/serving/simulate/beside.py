"""Compares a measured load of one server (`bench.serving`) with its simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench import report
from polarlm.bench.serving.plan import poisson
from polarlm.bench.serving.simulate.costs import Costs
from polarlm.bench.serving.simulate.events import Fleet, Simulation
from polarlm.bench.serving.simulate.machine import Settings
from polarlm.bench.serving.simulate.tiers import TierSize
from polarlm.bench.serving.simulate.trace import Trace
from polarlm.engine import EngineError

_PERCENTS = (50, 95)
_AFTER = 3600.0  # seconds that the simulation continues after the last arrival


def beside(file: Path, costs: Costs) -> dict[str, Any]:
    """The measured and the simulated hit rate and seconds to the first token. Raises EngineError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        load, waits = found["load"], found["latencies"]["first_token_seconds"]["percentiles"]
        trace = _trace(load)
        tokens = found["blocks"] * 64
        measured = {"hit_rate": found["prefix_hit_rate"], **{f"p{percent}": waits[percent] for percent in _PERCENTS}}
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise EngineError(f"--beside {file}: this is no result of bench.serving ({error!r})") from None
    fleet = Fleet(1, Settings(costs, load["clients"]), [TierSize(tokens)])
    result = Simulation(trace, fleet, load["seconds"] + _AFTER).run()
    simulated = {"hit_rate": result.hit_rate, **{f"p{percent}": result.wait(percent) for percent in _PERCENTS}}
    return {"file": file.name, "measured": measured, "simulated": simulated}


def _trace(load: dict[str, Any]) -> Trace:
    """The requests that `bench.serving` sends, each as a conversation of one turn after the same prefix."""
    starts = poisson(load["rate"], load["seconds"], load["requests"], np.random.default_rng(load["seed"]))
    count = len(starts)
    same = np.ones(count, int)
    return Trace(
        begins=np.array(starts),
        system=0 * same,
        history=0 * same,
        first=np.arange(count + 1),
        prompt=load["prompt_tokens"] * same,
        answer=load["max_tokens"] * same,
        pause=np.zeros(count),
        system_tokens=np.array([load["shared_prefix"]]),
    )


def format_beside(pair: dict[str, Any]) -> str:
    """A table with the ratio of measured to simulated figures."""
    measured, simulated = pair["measured"], pair["simulated"]
    rows = [
        (
            "cached",
            f"{100 * measured['hit_rate']:.1f} %",
            f"{100 * simulated['hit_rate']:.1f} %",
            _ratio(pair, "hit_rate"),
        )
    ]
    for percent in _PERCENTS:
        name = f"p{percent}"
        cells = f"{1e3 * measured[name]:,.1f}", f"{1e3 * simulated[name]:,.1f}"
        rows.append((f"first token, {name}, ms", *cells, _ratio(pair, name)))
    return report.table(("one server", "measured", "simulated", "measured / simulated"), rows)


def _ratio(pair: dict[str, Any], name: str) -> str:
    return f"{pair['measured'][name] / pair['simulated'][name]:.2f}" if pair["simulated"][name] else "—"
