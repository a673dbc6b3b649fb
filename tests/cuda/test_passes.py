"""Prompts that are computed together, against the same prompts one by one, on the emulated device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError, PromptOptions, SamplingParams, codecs
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.model.forward import Transformer
from polarlm.engine.outputs import fold
from polarlm.engine.state.layer_shapes import FinerKind
from polarlm.engine.state.store import KVStore, SequenceKV
from tests.cuda.emulated import open_device
from tests.cuda.test_model_emulated import N, model_of
from tests.sampling.constrained import InTurn
from tests.tiny import VOCABULARY, assert_idle, blocks_left, load_tiny

# Tokens that a sequence has, and tokens of its prompt: less than a block, to its end, beyond it, within and at its end.
PROMPTS = [(0, 1), (0, N), (0, N + 1), (N, 3), (40, 8), (41, 30), (3 * N, 2 * N)]


def begun(model: Transformer, rng: np.random.Generator) -> list[SequenceKV]:
    sequences = []
    for have, _ in PROMPTS:
        sequences.append(model.store.new_sequence())
        if have:
            span = model.store.open(sequences[-1], have)
            model.forward([span], rng.integers(5, 96, have).tolist(), outputs=1)
            model.store.commit(span)
    return sequences


def blocks(store: KVStore, sequence: SequenceKV) -> list[np.ndarray]:
    """What the store has of a sequence: codes, and the halves of its slots."""
    stored = []
    for group, table in zip(store.groups, sequence.tables, strict=True):
        kept = [slot for slot in (table.sink, table.current) if slot is not None]
        for array in [group.read_full(slot, sequence.length % N or N) for slot in kept]:
            stored += [array[key] for key in sorted(array)]
        if table.quantized:
            codes = group.read_blocks(table.quantized)
            stored += [codes[key] for key in sorted(codes)]
    return stored


BY_AGE = FinerKind(*map(codecs.get, ("ring5", "ring5")), is_by_age=True)
CASES = [
    ("qwen2_mixed_windows", ("ring4", "ring3.5"), None),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("llama_gqa_linear", ("ring3", "ring3"), BY_AGE),
            ("gemma2_mqa", ("f16", "f16"), None),
            ("gemma4_shared_kv", ("ring4", "ring3.5"), None),
            ("gemma4_experts_beside", ("ring4", "ring3.5"), None),
        ]
    ),
]


@pytest.mark.parametrize(("fixture", "types", "finer"), CASES)
def test_prompts_of_a_pass_are_computed_as_one_by_one(
    fixture: str, types: tuple[str, str], finer: FinerKind | None
) -> None:
    results = []
    for together in (True, False):
        model = model_of(CudaOps(open_device(checked=False)), fixture, types, room=(256, 10), more=2560, finer=finer)
        rng = np.random.default_rng(3)
        sequences = begun(model, rng)
        ids = [rng.integers(5, 96, count).tolist() for _, count in PROMPTS]
        if together:
            spans = model.store.open_pass([(kv, len(one)) for kv, one in zip(sequences, ids, strict=True)])
            logits = model.logits(model.forward_pass(spans, ids))
            model.store.commit_steps(spans)
        else:
            rows = []
            for kv, one in zip(sequences, ids, strict=True):
                span = model.store.open(kv, len(one))
                rows.append(model.logits(model.forward([span], one, outputs=1)))
                model.store.commit(span)
            logits = np.concatenate(rows)
        results.append((logits, [blocks(model.store, kv) for kv in sequences]))
    (logits, stored), (wanted, wanted_stored) = results
    # Products of a pass have more rows, which a library may add in another order.
    assert np.abs(logits - wanted).max() <= 2.0**-11 * (wanted.max() - wanted.min())
    for ours, alone in zip(stored, wanted_stored, strict=True):
        assert all((a == b).mean() > 0.98 for a, b in zip(ours, alone, strict=True))


# -- requests ------------------------------------------------------------------------------------------------------

TOKENS = np.random.default_rng(5).integers(5, VOCABULARY, (8, 40)).tolist()
GREEDY = SamplingParams(max_tokens=2, temperature=0, repeat_penalty=1, ignore_eos=True)
ANEW = PromptOptions(cache_prompt=False)


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[Engine]:
    settings = {"block_size": N, "ctx_size": 256, "cache_type": "f16", "calibration": False, "parallel": 6}
    with load_tiny(tiny_path, ops=CudaOps(open_device(checked=False)), **settings) as engine:
        yield engine
        assert_idle(engine)


@pytest.fixture
def passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A list that gets the rows of the prompts of each pass."""
    seen: list[list[int]] = []
    compute = engine._model.forward_pass
    monkeypatch.setattr(
        engine._model, "forward_pass", lambda spans, ids: seen.append([*map(len, ids)]) or compute(spans, ids)
    )
    return seen


def ask(engine: Engine, prompts: Sequence[Sequence[int]], constraints: Mapping[int, Any] = {}) -> list[list[Any]]:
    """The chunks of each request, asked at the same time; the last one may be an error."""
    outboxes: list[list[Any]] = [[] for _ in prompts]
    for number, (prompt, outbox) in enumerate(zip(prompts, outboxes, strict=True)):
        engine.submit(prompt, GREEDY, ANEW, into=outbox, constraint=constraints.get(number))
    while engine.work():
        pass
    return outboxes


def answers(outboxes: Sequence[Sequence[Any]]) -> list[tuple[int, ...]]:
    return [fold(outbox).token_ids for outbox in outboxes]


def test_prompts_that_wait_are_computed_in_a_pass_as_far_as_it_has_rows(
    engine: Engine, passes: list[list[int]]
) -> None:
    """A prompt takes whole blocks: 48 tokens of 256. Short turns are rows of a step."""
    prompts = [*TOKENS[:6], TOKENS[6][:9]]
    together = answers(ask(engine, prompts))
    assert passes == [[40] * 5, [40]]
    assert together == [fold(outbox).token_ids for prompt in prompts for outbox in ask(engine, [prompt])]


def test_a_prompt_that_fails_harms_no_other(
    engine: Engine, passes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = answers(ask(engine, TOKENS[:4]))
    compute = engine._model.forward_pass

    def failing(spans: Sequence[Any], ids: Sequence[list[int]]) -> Any:
        if TOKENS[1] in ids:
            raise EngineError("This prompt fails")
        return compute(spans, ids)

    monkeypatch.setattr(engine._model, "forward_pass", failing)
    outboxes = ask(engine, TOKENS[:4])
    assert [type(outbox[-1]) for outbox in outboxes].count(EngineError) == 1
    assert isinstance(outboxes[1][-1], EngineError)
    others = [outbox for number, outbox in enumerate(outboxes) if number != 1]
    assert answers(others) == [wanted[0], *wanted[2:]]


def test_a_constraint_that_fails_harms_no_other(engine: Engine, passes: list[list[int]]) -> None:
    wanted = answers(ask(engine, TOKENS[:3]))

    class Failing(InTurn):
        def allowed(self) -> None:
            raise EngineError("This constraint fails")

    outboxes = ask(engine, TOKENS[:3], {1: Failing([None], VOCABULARY)})
    assert passes == [[40] * 3] * 2
    assert isinstance(outboxes[1][-1], EngineError)
    assert answers([outboxes[0], outboxes[2]]) == [wanted[0], wanted[2]]


def test_prompts_without_room_wait(engine: Engine, passes: list[list[int]]) -> None:
    """At each place in a pass: one prompt and its answer need two blocks, beside the sink and the current block."""
    wanted = answers(ask(engine, TOKENS[:4]))
    for left in range(2, 7):
        with blocks_left(engine, left):
            assert answers(ask(engine, TOKENS[:4])) == wanted
    assert {len(rows) for rows in passes} >= {1, 2, 3, 4}


def test_a_cancelled_request_leaves_the_others_alone(engine: Engine, passes: list[list[int]]) -> None:
    wanted = answers(ask(engine, TOKENS[:3]))
    outboxes: list[list[Any]] = [[] for _ in range(3)]
    tickets = [engine.submit(prompt, GREEDY, ANEW, into=box) for prompt, box in zip(TOKENS, outboxes, strict=False)]
    tickets[1].cancel()
    engine.work()
    assert passes[-1] == [40, 40]
    tickets[0].cancel()
    while engine.work():
        pass
    assert answers(outboxes[2:]) == wanted[2:]


def test_prompts_that_are_read_and_continued_ones_are_computed_alone(engine: Engine, passes: list[list[int]]) -> None:
    """Whose log-probabilities are asked for; a prompt that goes on with what the store has joins a pass."""
    outboxes: list[list[Any]] = [[] for _ in range(4)]
    reading = replace(GREEDY, prompt_logprobs=1)
    engine.generate(TOKENS[0], GREEDY)
    longer = [*TOKENS[0], *TOKENS[3]]
    for prompt, params, outbox in zip(
        [TOKENS[1], longer, TOKENS[4], TOKENS[2]], [GREEDY, GREEDY, reading, GREEDY], outboxes, strict=True
    ):
        engine.submit(prompt, params, into=outbox)
    while engine.work():
        pass
    assert passes[1:] == [[40, 40], [40]]
    assert all(fold(outbox).finish_reason == "length" for outbox in outboxes)
