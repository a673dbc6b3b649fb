"""The plan of a request: the lines of `plan_of`'s table."""

from __future__ import annotations

from types import SimpleNamespace as Fake
from typing import Any

import pytest

from polarlm.engine.requests.plan import plan_of
from polarlm.engine.requests.request import Plan, Request
from polarlm.engine.requests.scheduler import TokenSequence

BLOCK, STEP, MOST = 64, 16, 500
TABLE: list[tuple[dict[str, Any], Plan]] = [
    ({"stored": None}, Plan("wait")),
    ({"stored": 100, "generated": 1}, Plan("step", 0)),
    ({"stored": 40, "is_replayable": True}, Plan("step", 60)),
    ({"stored": 40, "is_replayable": True, "is_whole": True}, Plan("join", 60)),
    ({"stored": 90}, Plan("step", 10)),
    ({"stored": 83}, Plan("join", 17)),  # more than a step has
    ({"stored": 60}, Plan("join", 40)),  # in two blocks
    ({"stored": 90, "sparse_groups": 1}, Plan("join", 10)),  # snapshots need a prompt
    ({"stored": 90, "max_tokens": 0}, Plan("join", 10)),  # without a step
    ({"stored": 99, "max_tokens": 0}, Plan("alone", 1)),
    ({"stored": 0, "prompt": MOST + 1}, Plan("alone", MOST + 1)),
    ({"stored": 40, "text_from": 50}, Plan("alone", 60)),  # an image is left
    ({"stored": 0, "reads_prompt": True}, Plan("alone", 100)),
    ({"stored": 40, "generated": 5, "cached": 40}, Plan("alone", 60)),  # preempted: its prompt again,
    ({"stored": 90, "generated": 5, "cached": 90}, Plan("alone", 10, as_steps=True)),  # which was rows of a step,
    ({"stored": 100, "generated": 90}, Plan("alone", 28, as_steps=True)),  # and its answer, up to the block's end
    ({"stored": 20, "generated": 5, "cached": 40}, Plan("alone", 20)),  # up to where its prompt began
]


@pytest.mark.parametrize(("given", "wanted"), TABLE)
def test_the_first_line_that_is_true_says_how_a_request_is_computed(given: dict[str, Any], wanted: Plan) -> None:
    one = Fake(prompt=100, generated=0, max_tokens=9, text_from=0, reads_prompt=False, is_whole=False, sparse_groups=0)
    vars(one).update({"cached": given["stored"], "is_replayable": False} | given)
    one.sequence = TokenSequence((7,) * one.prompt, one.max_tokens, text_from=one.text_from)
    one.sequence.ids += [7] * one.generated
    one.image_positions = None
    one.kv = None if one.stored is None else Fake(length=one.stored)
    one.span_end = lambda start, block: Request.span_end(one, start, block)
    store = Fake(shape=Fake(block_size=BLOCK), sparse_groups=one.sparse_groups)
    store.rows_of_block = lambda kv: min(STEP, BLOCK - kv.length % BLOCK)
    assert plan_of(one, store, MOST, is_replayable=one.is_replayable) == wanted  # type: ignore[arg-type]
