"""Answers of a real model at temperature 1 parse, and are of their schemas, whatever JSON Schema these use."""

from __future__ import annotations

import json
from collections import deque
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.outputs import Chunk, fold


def exact(text: str) -> Any:
    """JSON whose fractions are decimal, so that 0.28 is a multiple of 0.01."""
    return json.loads(text, parse_float=Decimal)


SCHEMAS = exact((Path(__file__).parents[1] / "fixtures" / "schemas.json").read_text(encoding="utf-8"))
SEEDS = 20
# Those that this package knows as the standards have them: it takes no date of the year 0.
FORMATS = jsonschema.FormatChecker(["email", "ipv4", "uuid"])
QUESTION = [{"role": "user", "content": "Answer as JSON."}]


@pytest.mark.slow
@pytest.mark.parametrize("case", SCHEMAS[::5], ids=lambda case: case["name"])
def test_answers_are_of_their_schema(case: dict[str, Any], demo: Engine) -> None:
    """Twenty answers of the demonstration model for each schema."""
    schema = json.dumps(case["schema"], default=float)
    outboxes: list[deque[Chunk | Exception]] = [deque() for _ in range(SEEDS)]
    for seed, outbox in enumerate(outboxes):
        params = SamplingParams(schema=schema, temperature=1, top_k=0, top_p=1, min_p=0, seed=seed, max_tokens=2000)
        demo.submit(QUESTION, params, into=outbox)
    while demo.work():
        pass
    answers = [fold(outbox) for outbox in outboxes]
    complete = [answer.text for answer in answers if answer.finish_reason == "stop"]
    assert len(complete) >= SEEDS - 1  # names and nesting may have no end, and a model may find none
    for text in complete:
        jsonschema.validate(exact(text), case["schema"], format_checker=FORMATS)
