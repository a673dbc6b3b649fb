"""Chains of tool calls: only the right calls solve them, and an interrupted measurement goes on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from polarlm.bench.lab import tool_chains
from polarlm.bench.lab.tool_chains import TOOLS, Task, chain, history, orders, receipt, solves
from polarlm.bench.lab.tool_cost import CHAINS, main
from polarlm.bench.result import read
from tests import call_templates
from tests.tool_model import tool_model

LISTED = orders(random.Random(1))
EARLIER = history(LISTED, 1)
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


class Clerk:
    """Makes the calls that tasks ask for, as a model would; `spoil` may change them."""

    def __init__(self, tasks: list[Task], spoil: Any = lambda step, name, arguments: (name, arguments)) -> None:
        self._tasks, self._spoil = tasks, spoil
        self.heard: list[list[dict[str, Any]]] = []

    def chat(self, messages: list[dict[str, Any]], *_: Any) -> SimpleNamespace:
        step = len(self.heard)
        self.heard.append([*messages])
        name, arguments = self._spoil(step, *self._tasks[step][1])
        jsonschema.validate(arguments, SCHEMAS[name])
        function = {"name": name, "arguments": json.dumps(arguments)}
        return SimpleNamespace(finish_reason="tool_calls", tool_calls=[{"function": function}])


def test_the_right_calls_solve_a_chain_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them fit the functions."""
    monkeypatch.setattr(tool_chains, "call_grammar", lambda engine: "")
    for number in range(20):
        tasks = chain(number, LISTED)
        clerk = Clerk(tasks)
        assert solves(clerk, EARLIER, number, tasks)  # type: ignore[arg-type]
        told = json.dumps(clerk.heard[-1])
        assert all(text in told for text, _ in tasks)
        assert receipt(number) in told
        for wrong in range(len(tasks)):

            def spoil(step: int, name: str, arguments: dict[str, Any], wrong: int = wrong) -> Any:
                return name, {**arguments, "order_id": "A-1"} if step == wrong else arguments

            assert not solves(Clerk(tasks, spoil), EARLIER, number, tasks)  # type: ignore[arg-type]


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
