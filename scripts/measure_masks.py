"""Measure what a schema costs on the CPU: `python -m scripts.measure_masks` prints times of masks and of steps.

It runs the schemas of the tests with the demonstration model, each of them after the same answer without a schema, so
that a busy machine is as slow for both. Steps are compared without those that compute tokens together that the schema
leaves no choice of: these have more rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.sampling.grammars import Grammars

SCHEMAS = Path(__file__).parents[1] / "tests" / "fixtures" / "schemas.json"
QUESTION = [{"role": "user", "content": "Answer as JSON."}]
TOKENS = 48


class _Timed:
    """A constraint that keeps the seconds of its masks."""

    def __init__(self, constraint: Any, seconds: list[float]) -> None:
        self._constraint, self._seconds = constraint, seconds

    def allowed(self) -> Any:
        began = time.perf_counter()
        mask = self._constraint.allowed()
        self._seconds.append(time.perf_counter() - began)
        return mask

    def accept(self, token: int) -> None:
        self._constraint.accept(token)

    @property
    def finished(self) -> bool:
        return bool(self._constraint.finished)


def main() -> None:
    """Print the figures of all schemas."""
    masks: list[float] = []
    with_schema: list[float] = []
    without: list[float] = []
    rows: list[int] = []
    with Engine.load(device="cpu", ctx_size=2048) as engine:
        grammars = Grammars(engine.model.tokenizer, engine.model.vocabulary.stop)
        step = engine._model.step
        engine._model.step = lambda *given: rows.append(len(given[1])) or step(*given)  # type: ignore
        for case in json.loads(SCHEMAS.read_text(encoding="utf-8")):
            schema = SamplingParams(schema=case["schema"])
            for seconds in (None, masks):
                constraint = None if seconds is None else _Timed(grammars.constraint(schema), seconds)
                params = SamplingParams(seed=1, temperature=1, max_tokens=TOKENS, ignore_eos=seconds is None)
                engine.submit(QUESTION, params, into=[], constraint=constraint)
                units: list[float] = []
                while True:
                    rows.clear()
                    began = time.perf_counter()
                    if not engine.work():
                        break
                    if rows == [1]:
                        units.append(time.perf_counter() - began)
                (without if seconds is None else with_schema).extend(units[1:])
    _print("masks", masks, 1e6, "µs")
    _print("steps with a schema", with_schema, 1e3, "ms")
    _print("steps without", without, 1e3, "ms")
    print(f"A step without takes {median(without) / median(with_schema):.3f} of one with a schema (medians).")


def _print(name: str, seconds: Sequence[float], scale: float, unit: str) -> None:
    ordered = sorted(scale * value for value in seconds)
    most, last = ordered[len(ordered) * 9 // 10], ordered[-1]
    print(f"{len(ordered)} {name}: median {median(ordered):.1f} {unit}, 90 % {most:.1f} {unit}, most {last:.1f} {unit}")


if __name__ == "__main__":
    main()
