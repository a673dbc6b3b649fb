"""The simulation of many machines: queues as the formulas say, caches as their sizes say, and no request lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.bench.report import RESULTS
from polarlm.bench.serving.simulate.__main__ import main
from polarlm.bench.serving.simulate.costs import Costs, read
from polarlm.bench.serving.simulate.events import MOST_EVENTS, Fleet, Result, Simulation
from polarlm.bench.serving.simulate.machine import Settings
from polarlm.bench.serving.simulate.routing import ROUTERS, Affinity, LeastLoaded
from polarlm.bench.serving.simulate.tiers import Tier, Tiers, TierSize
from polarlm.bench.serving.simulate.trace import AGENT, CHAT, Trace, make

NO_LIMIT = TierSize(float("inf"))
FREE = Costs("free", "made up", "f16", *[0.0] * 5, bytes_per_token=1.0, most_sequences=1000)
SPEED = next(RESULTS.glob("speed-smollm2-135m-instruct-amd*.json"), None)


def poisson_trace(rate: float, seconds: float, prompt: int, answer: Any) -> Trace:
    """Conversations of one turn, without a system prompt."""
    rng = np.random.default_rng(0)
    count = rng.poisson(rate * seconds)
    zeros = np.zeros(count, int)
    answers = answer(rng, count) if callable(answer) else zeros + answer
    begins = np.sort(rng.uniform(0, seconds, count))
    numbers = np.arange(count + 1)
    return Trace(begins, zeros, zeros, numbers, zeros + prompt, answers, zeros + 0.0, np.zeros(1, int))


def run(trace: Trace, costs: Costs, end: float, parallel: int = 10_000, machines: int = 1, **more: Any) -> Result:
    return Simulation(trace, Fleet(machines, Settings(costs, parallel), [NO_LIMIT], **more), end).run()


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_prompts_of_one_length_wait_as_in_m_d_1(load: float) -> None:
    costs = replace(FREE, prompt_token=0.01)  # seconds: a prompt of 10 tokens takes 0.1
    result = run(poisson_trace(load / 0.1, 20_000, 10, 1), costs, 20_000)
    expected = 0.1 + load * 0.1 / (2 * (1 - load))
    assert result.waits.mean() == pytest.approx(expected, rel=0.05)
    assert result.busy == pytest.approx(load, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_answers_share_a_machine_as_in_m_m_1_with_processor_sharing(load: float) -> None:
    """Each running request makes a step longer by what it takes alone, as if all shared the machine evenly."""
    costs = replace(FREE, sequence=0.001)
    answers = lambda rng, count: 1 + np.maximum(1, np.round(rng.exponential(100, count))).astype(int)  # noqa: E731
    result = run(poisson_trace(load / 0.1, 40_000, 1, answers), costs, 40_000)
    assert result.busy == pytest.approx(load, rel=0.03)
    assert result.whole.mean() == pytest.approx(0.1 / (1 - load), rel=0.06)


def test_steps_and_prompts_share_the_time() -> None:
    """One answer of 100 steps, and a prompt that comes in between: alone 1 s each, together the prompt gets half."""
    costs = replace(FREE, step=0.01, prompt_token=0.1)
    trace = Trace(
        *(np.array(column) for column in ([0.0, 0.5], [0, 0], [0, 0], [0, 1, 2], [0, 10], [101, 1], [0.0, 0.0], [0]))
    )
    result = run(trace, costs, 100)
    assert result.waits.tolist() == pytest.approx([0.0, 1.5])  # until 1.5 s the prompt has had half of 1 s, then all
    assert sorted(result.whole.tolist()) == pytest.approx([1.5, 1.5])


@pytest.mark.parametrize("routing", ROUTERS)
def test_no_request_is_lost_and_each_has_few_events(routing: str) -> None:
    trace = make(20, -20, 60, 0.5, 8192, seed=3)
    costs = Costs("some", "made up", "f16", 2e-5, 1e-9, 4e-3, 1e-5, 1e-8, 1.0, 64)
    remote = TierSize(float("inf"), 1e5, 1e-3)
    sizes = [TierSize(60_000), TierSize(40_000, 1e6, 1e-5)]
    fleet = Fleet(7, Settings(costs, 16), sizes, remote, routing)
    simulation = Simulation(trace, fleet, 60)
    result = simulation.run()
    assert result.under_way > 0
    assert result.arrived == result.finished + result.under_way <= trace.requests
    assert len(result.waits) >= len(result.whole) > 500
    assert result.events <= MOST_EVENTS * trace.requests
    assert 0 < sum(result.hits.values()) < result.prompt_tokens
    assert all(result.hits[tier] for tier in ("store", "ram", "remote"))
    for machine in simulation._machines:
        for tier in machine.tiers._local:
            assert tier.used == tier.pinned + sum(tier.kept.values())
            assert tier.used <= tier.capacity or not tier.kept
        kept = [key for tier in machine.tiers._local for key in tier.kept]
        assert len(kept) == len(set(kept))
    again = Simulation(trace, fleet, 60).run()
    assert (again.waits.tolist(), again.hits, again.events) == (result.waits.tolist(), result.hits, result.events)


def test_what_was_used_longest_ago_goes_one_tier_further() -> None:
    tiers = Tiers([TierSize(10), TierSize(10), TierSize(5)], Tier(float("inf")))
    for key in range(5):
        tiers.put(key, 4)
        tiers.share(key, 4)
    assert [tiers.find(key) for key in range(5)] == [(2, 4), (1, 4), (1, 4), (0, 4), (0, 4)]
    tiers.put(1, 4)
    assert [tiers.find(key)[0] for key in range(5)] == [2, 0, 1, 1, 0]
    tiers.put(5, 10)
    assert [tiers.find(key)[0] for key in range(6)] == [3, 1, 3, 2, 1, 0]
    tiers.pin(1, 9)
    assert [tiers.find(key)[0] for key in (1, 5)] == [3, 1]
    tiers.unpin(1, 9)
    assert tiers.find(1) == (0, 9)


def test_a_transfer_is_waited_for_only_if_it_is_faster_than_the_prefill() -> None:
    costs = replace(FREE, prompt_token=0.001, step=0.001)
    columns = [0.0], [0], [1000], [0, 1], [10], [1], [0.0], [0]
    trace = Trace(*(np.array(column) for column in columns))
    for speed, wait, hits in ((10_000, 0.11, 1000), (100, 1.01, 0)):
        remote = TierSize(float("inf"), speed)
        fleet = Fleet(1, Settings(costs, 8), [TierSize(500)], remote)  # too small for what came before
        result = Simulation(trace, fleet, 100).run()
        assert (result.waits.tolist(), result.hits["remote"]) == (pytest.approx([wait]), hits)


def test_affinity_keeps_a_conversation_on_a_machine_until_that_has_too_much() -> None:
    router = Affinity(10, 0)
    first = [router.choose(conversation) for conversation in range(1000)]
    assert first == [router.choose(conversation) for conversation in range(1000)]
    assert min(np.bincount(first, minlength=10)) > 60
    router.changed(first[0], 5)  # of 5 in all
    assert router.choose(0) != first[0]
    others = [number for number in range(1000) if first[number] != first[0]]
    assert [router.choose(number) for number in others] == [first[number] for number in others]


def test_the_machine_with_the_fewest_requests_is_chosen() -> None:
    router, loads, rng = LeastLoaded(6, 0), [0] * 6, np.random.default_rng(1)
    for _ in range(500):
        machine = router.choose(0)
        assert loads[machine] == min(loads)
        loads[machine] += 1
        router.changed(machine, loads[machine])
        other = int(rng.integers(6))
        if loads[other] and rng.random() < 0.7:
            loads[other] -= 1
            router.changed(other, loads[other])


def test_loads_are_what_they_say() -> None:
    trace = make(50, 0, 400, 0.4, 32768, seed=1)
    assert trace.requests / 400 == pytest.approx(50, rel=0.15)
    assert (np.diff(trace.first) >= 1).all()
    assert (np.diff(trace.begins) >= 0).all()
    agents = trace.system >= CHAT.systems
    assert np.diff(trace.first)[agents].sum() / trace.requests == pytest.approx(0.4, abs=0.06)
    assert trace.history[trace.begins < 10].sum() > 0  # conversations that are under way
    fresh = (trace.history == 0) & ~agents
    openings = trace.prompt[trace.first[:-1][fresh]]
    assert np.median(openings) == pytest.approx(CHAT.opening.median, rel=0.1)
    lengths = trace.history + np.add.reduceat(trace.prompt + trace.answer, trace.first[:-1])
    assert (lengths[agents] + AGENT.system.median <= 32768 + 2 * 16384).all()
    same = make(50, 0, 400, 0.4, 32768, seed=1)
    assert (same.prompt == trace.prompt).all()
    assert make(50, 0, 400, 0.4, 32768, seed=2).requests != trace.requests


@pytest.mark.skipif(SPEED is None, reason="no published speed is here, as in an installed package")
def test_costs_are_fitted_to_measurements() -> None:
    costs, found = read(SPEED), json.loads(SPEED.read_text())
    assert costs.source.startswith("measured: ")
    for row in found["rows"]:
        cell = next(cell for cell in row["cells"] if (cell["engine"], cell["cache"]) == ("polarlm", "balanced"))
        if row["section"] == "prompt":
            seconds, measured = costs.prefill(row["tokens"], 0), row["tokens"] / cell["median"]
        else:
            count = 1 if row["section"] == "generation" else int(row["name"].split()[2])
            seconds = costs.step + costs.sequence * count + costs.context_token * count * row["tokens"]
            measured = count / cell["median"]
        assert seconds == pytest.approx(measured, rel=0.25), row["name"]


def test_costs_of_another_cache_type_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "speed.json"
    memory = [{"engine": "polarlm", "cache": "f16"}]
    file.write_text(json.dumps({"benchmark": "speed", "rows": [], "memory": memory}))
    assert main(["--costs", str(file)]) == 2
    assert "needs one of the cache type balanced" in capsys.readouterr().err


def test_a_run_reports_both_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [(n, 2e-5 * n + 1e-9 * n * n / 2) for n in (512, 8192)]
    steps = [(b, c, 4e-3 + 1e-5 * b + 1e-8 * b * c) for b in (1, 64) for c in (1024, 8192)]
    for cache in ("balanced", "f16"):
        found = {
            "benchmark": "gpu.predict", "model": "8b", "weights": "bf16", "cache": cache, "gpu": {"name": "GPU"},
            "prompts": [{"tokens": n, "seconds": seconds} for n, seconds in points],
            "steps": [{"batch": b, "context": c, "seconds": seconds} for b, c, seconds in steps],
        }  # fmt: skip
        (tmp_path / f"{cache}.json").write_text(json.dumps(found))
    output = tmp_path / "out.json"
    files = ",".join(str(tmp_path / f"{cache}.json") for cache in ("balanced", "f16"))
    words = ["--costs", files, "--machines", "1,3", "--load", "4", "--seconds", "10", "--warm", "10"]
    assert main([*words, "--target", "2", "--store", "1G", "--output", str(output)]) == 0
    told, result = capsys.readouterr().out, json.loads(output.read_text())
    assert "PREDICTED, not measured" in told
    assert "1 request" not in told.splitlines()[0]
    assert len(result["by_machines"]) == 2 * len(ROUTERS)
    needed = {(row["cache"], row["routing"], tuple(row["tiers"])): row["machines"] for row in result["needed"]}
    assert needed["balanced", "affinity", ()] <= needed["f16", "affinity", ()]
    assert output.with_suffix(".png").exists()
    assert main(["--costs", str(output)]) == 2
    assert main([*words, "--rate", "1e-9", "--load", "1e-9", "--output", str(output)]) == 2
    assert "--costs" in capsys.readouterr().err


def test_a_measured_load_is_simulated_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The load's first request finds nothing, and all others find the shared prefix, if they come one by one."""
    load = {"rate": 0.5, "seconds": 60, "requests": 20, "seed": 0, "clients": 8}
    load |= {"prompt_tokens": 100, "shared_prefix": 300, "max_tokens": 8}
    measured = {"percentiles": [0.1] * 101}
    found = {"load": load, "blocks": 100, "prefix_hit_rate": 0.7, "latencies": {"first_token_seconds": measured}}
    file = tmp_path / "serving.json"
    file.write_text(json.dumps(found))
    words = [] if SPEED is not None else pytest.skip("no published speed is here, as in an installed package")
    output = tmp_path / "beside.json"
    assert main([*words, "--beside", str(file), "--output", str(output)]) == 0
    simulated = json.loads(output.read_text())["simulated"]
    assert simulated["hit_rate"] == pytest.approx(0.75 * 19 / 20)
    assert "71.2 %" in capsys.readouterr().out
    assert main(["--beside", str(output)]) == 2
    alone = tmp_path / "alone.json"
    found |= {"benchmark": "serving", "model": "some", "date": "today", "load": load | {"clients": 1}}
    found["latencies"]["between_tokens_seconds"] = {"percentiles": [0.01] * 101}
    alone.write_text(json.dumps(found))
    assert main(["--costs", str(alone), "--beside", str(file), "--output", str(output)]) == 0
    assert json.loads(output.read_text())["simulated"]["p50"] == pytest.approx(0.1, rel=0.05)
    alone.write_text(json.dumps(found | {"load": load}))
    assert main(["--costs", str(alone), "--beside", str(file)]) == 2
    assert "--clients 1" in capsys.readouterr().err
