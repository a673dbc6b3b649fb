"""Chains of tool calls: what they ask for can be done with the functions, and only the right calls solve them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from polarlm.bench.lab.tool_chains import TOOLS, Task, chain, history, orders, receipt, solves
from polarlm.bench.lab.tool_cost import CHAINS, main
from polarlm.bench.result import read
from polarlm.engine import Engine
from tests import call_templates
from tests.tool_model import tool_engine, tool_model

LISTED = orders(random.Random(1))
EARLIER = history(LISTED, 1)
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    pytest.importorskip("llguidance")
    with tool_engine(tmp_path_factory.mktemp("model"), call_templates.HERMES, ctx_size=16384) as engine:
        yield engine


class Clerk:
    """Makes the calls that tasks ask for, as a model would; `spoil` may change them."""

    def __init__(self, engine: Engine, tasks: list[Task], spoil: Any = lambda step, name, arguments: (name, arguments)):
        self.model, self._tasks, self._spoil = engine.model, tasks, spoil
        self.heard: list[list[dict[str, Any]]] = []

    def chat(self, messages: list[dict[str, Any]], *_: Any) -> SimpleNamespace:
        step = len(self.heard)
        self.heard.append([*messages])
        name, arguments = self._spoil(step, *self._tasks[step][1])
        function = {"name": name, "arguments": json.dumps(arguments)}
        return SimpleNamespace(finish_reason="tool_calls", tool_calls=[{"function": function}])


def test_tasks_are_done_by_calls_that_fit_the_functions() -> None:
    lengths = set()
    for number in range(100):
        tasks = chain(number, LISTED)
        lengths.add(len(tasks))
        assert chain(number, LISTED) == tasks
        for _, (name, arguments) in tasks:
            jsonschema.validate(arguments, SCHEMAS[name])
    assert lengths == {2, 3, 4}


def test_the_right_calls_solve_a_chain_and_no_others(engine: Engine) -> None:
    for number in range(20):
        tasks = chain(number, LISTED)
        clerk = Clerk(engine, tasks)
        assert solves(clerk, EARLIER, number, tasks)  # type: ignore[arg-type]
        told = json.dumps(clerk.heard[-1])
        assert all(text in told for text, _ in tasks)
        assert receipt(number) in told
        spoils = [
            lambda step, name, arguments: ("cancel_order", arguments) if step == 1 else (name, arguments),
            lambda step, name, arguments: (name, {**arguments, "order_id": "A-1"}) if step == 0 else (name, arguments),
        ]
        for spoil in spoils:
            assert not solves(Clerk(engine, tasks, spoil), EARLIER, number, tasks)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_command_writes_what_types_solve(tmp_path: Path) -> None:
    """A random model solves nothing; each type has the same chains, and a page is there."""
    pytest.importorskip("llguidance")
    words = ("--chains", "2", "--history", "5000", "--types", "balanced", "--device", "cpu", "-t", "1")
    model = tool_model(tmp_path, call_templates.HERMES)
    assert main([*words, "--model", str(model), "-o", str(tmp_path / "out.html")]) == 0
    result = read(tmp_path / "out.json")
    assert [label for _, label, _ in result.parts(CHAINS)] == ["f16", "balanced", "f16, 3 at once"]
    assert result.figures(CHAINS, "balanced")["p"].value == 1
    assert "lost" in (tmp_path / "out.html").read_text(encoding="utf-8")
    # An interrupted run goes on: what it has is not measured again.
    measured = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    measured["complete"], measured["rows"][0]["runs"] = False, [True, False]
    measured["rows"] = measured["rows"][:1]
    (tmp_path / "out.json").write_text(json.dumps(measured), encoding="utf-8")
    assert main([*words, "--model", str(model), "-o", str(tmp_path / "out.html")]) == 0
    result = read(tmp_path / "out.json")
    assert result["complete"]
    assert result.figures(CHAINS, "f16")["solved"].runs == (True, False)
    assert result.figures(CHAINS, "balanced")["lost"].value == 1
