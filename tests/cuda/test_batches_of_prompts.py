"""Prompts that are computed together, against the same prompts one by one, on the emulated device and on the CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.errors import DeviceLost
from polarlm.engine.model.batch import PromptBatch
from polarlm.engine.model.forward import Transformer
from polarlm.engine.outputs import fold
from polarlm.engine.requests import prefills
from polarlm.engine.state.store import KVStore, SequenceKV
from tests.bare import forward, forward_together
from tests.cpu import CpuOps
from tests.cuda import test_model_emulated
from tests.cuda.emulated import EmulatedDevice, open_device
from tests.cuda.test_model_emulated import N, Talk, model_from, model_of
from tests.cuda.test_packed_model import RandomWeights, mixed_model
from tests.pairs import mostly_slow
from tests.sampling.constrained import InTurn
from tests.tiny import VOCABULARY, assert_idle, blocks_left, load_tiny


def prompts_of(n: int) -> list[tuple[int, int]]:
    """Tokens that sequences have, and tokens of their prompts, for blocks of n tokens: less than a block, to its end,
    beyond it, within and at its end."""
    return [(0, 1), (0, n - 1), (0, n), (0, n + 1), (0, 3 * n + 8), (n, 3), (2 * n + 8, n // 2), (3 * n, 2 * n)]


def steps_of(n: int) -> list[tuple[int, int]]:
    """Tokens that running sequences have, and their rows of a step: one fills a block, one begins a block."""
    return [(3 * n - 1, 1), (2 * n, 1), (2 * n + 5, 3)]


def begun(model: Transformer, rng: np.random.Generator, lengths: Sequence[int]) -> list[SequenceKV]:
    sequences = []
    for have in lengths:
        sequences.append(model.store.new_sequence())
        if have:
            span = model.store.open(sequences[-1], have)
            forward(model, [span], rng.integers(5, 96, have).tolist(), outputs=1)
            model.store.commit(span)
    return sequences


def blocks(store: KVStore, sequence: SequenceKV) -> list[np.ndarray]:
    """What the store has of a sequence: codes, and the halves of its slots."""
    stored, n = list[np.ndarray](), store.shape.block_size
    for group, table in zip(store.groups, sequence.tables, strict=True):
        kept = [slot for slot in (table.sink, table.current) if slot is not None]
        for array in [group.read_full(slot, sequence.length % n or n) for slot in kept]:
            stored += [array[key] for key in sorted(array)]
        if table.quantized:
            codes = group.read_blocks(table.quantized)
            stored += [codes[key] for key in sorted(codes)]
    return stored


CASES = [
    ("qwen2_mixed_windows", ("ring4", "ring3.5"), N),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("llama_gqa_linear", ("ring4", "ring3.5"), 64),  # has too many rows to be recorded
            ("llama_gqa_linear", ("ring3", "ring3"), N),
            ("gemma2_mqa", ("f16", "f16"), N),
            ("gemma4_shared_kv", ("ring4", "ring3.5"), N),
            ("gemma4_experts_beside", ("ring4", "ring3.5"), N),
        ]
    ),
]


Results = tuple[np.ndarray, list[list[np.ndarray]]]


def together_and_alone(
    make_ops: Callable[[], Ops],
    fixture: str,
    types: tuple[str, str],
    n: int,
    monkeypatch: pytest.MonkeyPatch,
) -> list[Results]:
    """The logits, and what the store has of each sequence, of prompts in a batch, with steps where it takes them, and
    of all one by one."""
    monkeypatch.setattr(test_model_emulated, "N", n)
    results = list[Results]()
    for together in (True, False):
        ops = make_ops()
        running, prompts = steps_of(n) if ops.batches_take_steps else [], prompts_of(n)[not ops.batches_take_steps :]
        model = model_of(ops, fixture, types, room=(16 * n, 13), more=13 * 16 * n)
        rng, first = np.random.default_rng(3), len(prompts)
        sequences = begun(model, rng, [have for have, _ in [*prompts, *running]])
        ids = [rng.integers(5, 96, count).tolist() for _, count in [*prompts, *running]]
        outputs = [*([1] * first), *(count for _, count in running)]
        if together:
            spans = model.store.open_batch([(kv, len(one)) for kv, one in zip(sequences, ids[:first], strict=False)])
            steps = [
                model.store.open_step(kv, len(one)) for kv, one in zip(sequences[first:], ids[first:], strict=True)
            ]
            if ops.batches_take_steps:
                hidden = forward_together(model, spans, ids[:first], steps, [*chain.from_iterable(ids[first:])])
            else:
                hidden = forward_together(model, spans, ids)
            with ops.as_step():
                logits = model.logits(hidden)
            model.store.commit_steps([*spans, *steps])
        else:
            rows = []
            for kv, one, count in zip(sequences, ids, outputs, strict=True):
                span = model.store.open(kv, len(one))
                rows.append(model.logits(forward(model, [span], one, count)))
                model.store.commit(span)
            logits = np.concatenate(rows)
        results.append((logits, [blocks(model.store, kv) for kv in sequences]))
    return results


@pytest.mark.parametrize(("fixture", "types", "n"), CASES)
def test_prompts_and_steps_of_a_batch_are_computed_as_one_by_one(
    fixture: str,
    types: tuple[str, str],
    n: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the bit with compiled kernels. NumPy adds up products of more rows in another order, as a library may on a
    GPU, where steps have another attention, too: halves may be rounded up."""
    is_numpy = CpuOps.backend == "numpy"
    for make_ops, off, same in (
        (lambda: CudaOps(open_device(checked=False)), 2.0**-9, 0.98),
        (CpuOps, 2.0**-16 * is_numpy, 0.9 if is_numpy else 1),
    ):
        both = together_and_alone(make_ops, fixture, types, n, monkeypatch)
        (logits, stored), (wanted, wanted_stored) = both
        assert np.abs(logits - wanted).max() <= off * np.ptp(wanted)
        for a, b in zip(chain(*stored), chain(*wanted_stored), strict=True):
            if a.dtype.kind == "f" and make_ops is not CpuOps:
                np.testing.assert_allclose(a, b, rtol=0, atol=off * np.abs(b).max())
            else:
                assert (a == b).mean() >= same


@pytest.mark.parametrize("place", ["zeros", "launch"])
def test_a_batch_that_fails_leaves_nothing_to_the_next_one(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two layers' parts, and before what appends a layer's K/V has been taken."""
    device = open_device(checked=False)
    model = model_of(CudaOps(device), "llama_gqa_linear", ("f16", "f16"), room=(256, 13), more=2048)
    compute = getattr(device, place)

    def failing(*args: Any) -> Any:
        if args[0] == "append_kv_kernel" or place == "zeros":
            raise MemoryError
        return compute(*args)

    def run() -> Any:
        spans = model.store.open_batch([(model.store.new_sequence(), 20)])
        with model.store.abort_on_error(spans):
            hidden = model.logits(forward_together(model, spans, [[*range(5, 25)]]))
            model.store.commit_steps(spans)
        return hidden

    wanted = run()
    monkeypatch.setattr(device, place, failing)
    with pytest.raises(MemoryError):
        run()
    assert [(group.spans, group.pending) for group in model._batch_graphs._groups] == [(None, None)]
    assert not model._batch_graphs._spans
    monkeypatch.setattr(device, place, compute)
    np.testing.assert_array_equal(run(), wanted)


@pytest.mark.slow
def test_rows_of_a_step_are_the_same_in_a_batch_to_the_bit() -> None:
    """With packed weights, whose product gives a row the same result whatever rows are beside it."""
    config, _ = mixed_model()
    weights, types, room = RandomWeights.for_kind(config, "q8_0"), ("ring4", "ring3.5"), (256, 13)
    results = []
    for in_batch in (False, True):
        model = model_from(CudaOps(open_device(checked=False)), config, weights, types, room=room, more=2048)
        talk, rng = Talk(model, 4), np.random.default_rng(3)
        for number, have in enumerate((37, 20, 50)):
            talk.prompt(rng.integers(5, 96, have).tolist(), 1, number)
        prompt = rng.integers(5, 96, 30).tolist()
        if in_batch:
            spans = model.store.open_batch([(talk.sequences[3], len(prompt))])
            steps = [model.store.open_step(sequence) for sequence in talk.sequences[:3]]
            results.append(model.logits(forward_together(model, spans, [prompt], steps, [7, 8, 9]))[1:])
        else:
            talk.step([7, 8, 9])
            results.append(talk.logits[-1])
    np.testing.assert_array_equal(*results)


# -- requests ------------------------------------------------------------------------------------------------------

TOKENS = np.random.default_rng(5).integers(5, VOCABULARY, (8, 40)).tolist()
GREEDY = SamplingParams(max_tokens=2, temperature=0, repeat_penalty=1, ignore_eos=True)
ANEW = PromptOptions(cache_prompt=False)
on_a_gpu = pytest.mark.parametrize("engine", ["cuda"], indirect=True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def engine(tiny_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    settings = {"block_size": N, "ctx_size": 256, "cache_type": "f16", "calibration": False, "parallel": 6}
    ops = CpuOps() if request.param == "cpu" else CudaOps(open_device(checked=False))
    monkeypatch.setattr(type(ops), "batch_rows", 256, raising=False)
    with load_tiny(tiny_path, ops=ops, **settings) as engine:
        yield engine
        assert_idle(engine)


@pytest.fixture
def batches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A list that gets the rows of the prompts of each batch, and a 1 for each row of a running request."""
    seen: list[list[int]] = []

    def note(batch: PromptBatch) -> None:
        prompts = [span.count for span in batch.spans]
        seen.append([*prompts, *([1] * (len(batch.ids) - sum(prompts)))])

    before_batches(engine, monkeypatch, note)
    return seen


def before_batches(engine: Engine, monkeypatch: pytest.MonkeyPatch, call: Callable[[PromptBatch], None]) -> None:
    """Call `call` before each batch of prompts, also of one alone."""
    chunks = engine._model.chunks

    def noted(batch: PromptBatch) -> Any:
        call(batch)
        return (yield from chunks(batch))

    monkeypatch.setattr(engine._model, "chunks", noted)


def several(batches: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The batches of several prompts."""
    return [rows for rows in batches if len(rows) > 1]


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


def test_prompts_that_wait_are_computed_in_a_batch_as_far_as_it_has_rows(
    engine: Engine, batches: list[list[int]]
) -> None:
    """A prompt takes whole blocks: 48 tokens of 256. Short turns are rows of a step."""
    prompts = [*TOKENS[:6], TOKENS[6][:9]]
    together = answers(ask(engine, prompts))
    assert several(batches) == [[40] * 5]
    assert together == [fold(outbox).token_ids for prompt in prompts for outbox in ask(engine, [prompt])]


@on_a_gpu
def test_running_requests_take_a_step_in_a_batch(
    engine: Engine, batches: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that draws its tokens, and one whose constraint forces some, so that its step has several rows."""
    monkeypatch.setattr(prefills, "GAP", math.inf)  # however slow the machine is
    params, boxes = replace(GREEDY, max_tokens=8), [list[Any]() for _ in range(4)]

    def forced() -> InTurn:
        return InTurn([None, [7], [8], [9], None], VOCABULARY)

    wanted = [fold(engine.stream(TOKENS[0], params, ANEW, constraint=forced())).token_ids]
    wanted += [engine.generate(prompt, params, ANEW).token_ids for prompt in TOKENS[1:4]]
    engine.submit(TOKENS[0], params, ANEW, into=boxes[0], constraint=forced())
    engine.submit(TOKENS[1], params, ANEW, into=boxes[1])
    engine.work()
    engine.work()  # a step, whose time says when prompts are due
    batches.clear()
    for prompt, box in zip(TOKENS[2:4], boxes[2:], strict=True):
        engine.submit(prompt, params, ANEW, into=box)
    clock = next(iter(engine._runner.requests.values())).clock
    before, started = clock.generation, time.perf_counter()
    engine.work()
    assert clock.generation - before > 0.5 * (time.perf_counter() - started)
    while engine.work():
        pass
    assert len(batches) == 1
    assert batches[0][:2] == [40, 40]
    assert len(batches[0]) > 2
    assert answers(boxes) == wanted


@pytest.mark.parametrize("read", [None, 1], ids=["in a batch", "alone"])
def test_the_first_token_does_not_wait_for_codes(tiny_path: Path, read: int | None) -> None:
    """Head and sampling are launched before what encodes the last layers, with which all are sealed here."""
    device = EmulatedDevice(checked=False)
    settings = {"block_size": N, "ctx_size": 256, "cache_type": "ring4", "calibration": False}
    with load_tiny(tiny_path, ops=CudaOps(device), **settings) as engine:
        device.launches.clear()
        engine.generate(TOKENS[0], replace(GREEDY, max_tokens=1, prompt_logprobs=read), ANEW)
    encoded = [number for number, kernel in enumerate(device.launches) if kernel.startswith("encode_")]
    assert encoded
    assert device.launches.index("sample_kernel") < encoded[0]


@on_a_gpu
@mostly_slow("many, read", [(256, None), (40, None), (40, 1)], [(40, None)], ids=["few", "many", "alone"])
def test_only_batches_of_many_rows_tell_how_many_fit_beside_running_requests(
    engine: Engine, batches: list[list[int]], many: int, read: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, where a step may wait for no row at all, no prompt joins it once a batch has told so. A prompt that is
    computed alone, in chunks, tells nothing."""
    monkeypatch.setattr(prefills, "GAP", 1e-12)
    monkeypatch.setattr(engine._runner._batches, "few_rows", many)
    for prompt in TOKENS[:4]:
        engine.generate(prompt, replace(GREEDY, prompt_logprobs=read), ANEW)
    engine.submit(TOKENS[4], replace(GREEDY, max_tokens=8), ANEW, into=[])
    engine.work()
    engine.work()  # a step, whose time says when prompts are due
    batches.clear()
    ask(engine, TOKENS[:2])
    assert [rows for rows in batches if len(rows) > 2] == ([] if many == 40 and read is None else [[40, 40, 1]])


@pytest.mark.parametrize("bad", [0, 1])
def test_a_prompt_that_fails_harms_no_other(engine: Engine, bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = answers(ask(engine, TOKENS[:4]))

    def fail(batch: PromptBatch) -> None:
        if str(TOKENS[bad][:-1])[1:-1] in str(list(batch.ids)):
            raise EngineError("This prompt fails")

    before_batches(engine, monkeypatch, fail)
    monkeypatch.setattr(prefills, "GAP", 1e9)
    running, longer = list[Any](), replace(GREEDY, max_tokens=8)
    engine.submit(TOKENS[5], longer, ANEW, into=running)
    engine.work()
    engine.work()
    outboxes = ask(engine, TOKENS[:4])
    assert fold(running).token_ids == engine.generate(TOKENS[5], longer, ANEW).token_ids
    assert [type(outbox[-1]) for outbox in outboxes].count(EngineError) == 1
    assert isinstance(outboxes[bad][-1], EngineError)
    others = [number for number in range(4) if number != bad]
    assert answers([outboxes[number] for number in others]) == [wanted[number] for number in others]


@pytest.mark.parametrize("prompts", [1, 2], ids=["alone", "in a batch"])
@pytest.mark.parametrize("in_steps", [False, True])
def test_an_error_that_lasts_ends_all_requests_with_a_sentence(
    tiny_path: Path, prompts: int, in_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are computed and those that wait; then nothing is tried again, and the engine closes."""
    device = EmulatedDevice(checked=False)
    settings = {"block_size": N, "ctx_size": 256, "cache_type": "f16", "calibration": False, "parallel": 3}
    engine = load_tiny(tiny_path, ops=CudaOps(device), **settings)
    boxes, longer = [list[Any]() for _ in range(5)], replace(GREEDY, max_tokens=30)
    for prompt, box in zip(TOKENS[: 1 if in_steps else prompts], boxes, strict=False):
        engine.submit(prompt, longer, into=box)
    if in_steps:
        for _ in range(3):
            engine.work()
    for prompt, box in zip(TOKENS[prompts:], boxes[prompts:], strict=False):
        engine.submit(prompt, longer, into=box)
    device.broken = RuntimeError("an illegal memory access was encountered")
    tried: list[object] = []
    before_batches(engine, monkeypatch, tried.append)
    with pytest.raises(DeviceLost):  # tokens of a step that was computed before may come first
        [engine.work() for _ in range(4)]
    assert len(tried) <= 1
    boxes = [box for box in boxes if box]
    assert len(boxes) == 5 - (in_steps and prompts - 1)
    for *_, error in boxes:
        assert isinstance(error, DeviceLost)
        assert "emulated GPU has stopped with an error (an illegal memory access was encountered)" in str(error)
    for call in (engine.work, engine.status, lambda: engine.submit(TOKENS[0], into=[])):
        with pytest.raises(DeviceLost, match="start this program again"):
            call()
    assert len(tried) <= 1
    engine.close()


@pytest.mark.parametrize("types", ["f16", pytest.param("balanced", marks=pytest.mark.slow)])
def test_what_is_warmed_up_changes_no_answer_and_leaves_nothing(tiny_path: Path, types: str) -> None:
    """Each number of rows twice, in batches and in steps of at most as many requests as run: nothing while one waits,
    and nothing for which the prefix cache would forget what it knows, as for a batch of 256 rows."""
    settings = {"block_size": N, "ctx_size": 256, "cache_type": types, "calibration": False, "parallel": 3}
    wanted: list[Any] = []
    for warms_up in (False, True):
        with load_tiny(tiny_path, ops=CudaOps(EmulatedDevice(checked=False)), **settings) as engine:
            if warms_up:
                assert engine._parts.warm_up_timer is not None
                assert engine.warm_up()  # and waits for kernels that are compiled
                engine._parts.warm_up_timer.cancel()
                engine._parts.warm_up_timer.join()
                seen, runs = [], engine._model.ops.run_graph

                def noted(key: Any, work: Any, inputs: Any, seen: Any = seen, runs: Any = runs) -> Any:
                    seen.append((key, len(inputs[0])))
                    return runs(key, work, inputs)

                engine._model.ops.run_graph = noted
                box: list[Any] = []
                engine.submit(TOKENS[0], GREEDY, into=box)
                assert engine.warm_up()
                assert not seen
                while engine.work():
                    pass
                seen.clear()
                before = engine.status()
                while engine.warm_up():
                    pass
                parts = [*(("batch", rows) for rows in (16, 64, 128)), ("step", 1), ("step", 2)]
                assert seen == [part for part in parts for _ in range(2)]
                assert engine.status() == before
                engine._model.ops.run_graph = runs
            wanted.append(answers(ask(engine, TOKENS[:4])))
            assert_idle(engine)
    assert wanted[0] == wanted[1]


def test_a_batch_without_memory_for_its_buffers_has_fewer_prompts(
    engine: Engine, batches: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a prompt that has none alone fails."""
    long = [*TOKENS[4], *TOKENS[5]]
    wanted, ops = answers(ask(engine, TOKENS[:4])), engine._store.ops
    buffer, most = ops.buffer, 2 * 48

    def limited(format: Any, rows: int, **more: Any) -> Any:
        if rows > most:
            raise MemoryError
        return buffer(format, rows, **more)

    monkeypatch.setattr(ops, "buffer", limited)
    batches.clear()
    assert answers(ask(engine, TOKENS[:4])) == wanted
    assert batches == [[40] * 2] * 2
    most = 48
    failed, *others = ask(engine, [long, *TOKENS[:4]])
    assert failed[-1].code == "out_of_memory"
    assert answers(others) == wanted


def test_a_constraint_that_fails_harms_no_other(engine: Engine, batches: list[list[int]]) -> None:
    wanted = answers(ask(engine, TOKENS[:3]))

    class Failing(InTurn):
        def allowed(self) -> None:
            raise EngineError("This constraint fails")

    outboxes = ask(engine, TOKENS[:3], {1: Failing([None], VOCABULARY)})
    assert batches == [[40] * 3] * 2
    assert isinstance(outboxes[1][-1], EngineError)
    assert answers([outboxes[0], outboxes[2]]) == [wanted[0], wanted[2]]


def test_prompts_without_room_wait(engine: Engine, batches: list[list[int]]) -> None:
    """At each place in a batch: one prompt and its answer need two blocks, beside the sink and the current block."""
    wanted = answers(ask(engine, TOKENS[:4]))
    for left in range(2, 7):
        with blocks_left(engine, left):
            assert answers(ask(engine, TOKENS[:4])) == wanted
    assert {rows.count(40) for rows in batches} >= {2, 3, 4}


@pytest.mark.parametrize("engine", ["cpu"], indirect=True)
def test_a_request_leaves_a_batch_between_its_chunks(
    engine: Engine, batches: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cancelled, or preempted, as the first one is while others run: it is computed again. One more has been
    cancelled before."""
    wanted = answers(ask(engine, TOKENS[:4]))
    monkeypatch.setattr(engine._model.ops, "prefill_rows", 48)
    for gone in range(4):
        outboxes: list[list[Any]] = [[] for _ in range(4)]
        batches.clear()
        if gone == 3:
            outboxes.append([])
            engine.submit(TOKENS[4], replace(GREEDY, max_tokens=30), ANEW, into=outboxes[4])
            while engine.status().running == 0:
                engine.work()
        tickets = [
            engine.submit(prompt, GREEDY, ANEW, into=box) for prompt, box in zip(TOKENS, outboxes[:4], strict=False)
        ]
        engine.submit(TOKENS[5], GREEDY, ANEW, into=[]).cancel()
        while not several(batches):
            assert engine.work()
        assert all(len(rows) <= 4 for rows in batches)
        if gone == 3:
            assert engine._runner._preempt()
        else:
            tickets[gone].cancel()
        while engine.work():
            pass
        left = [number for number in range(4) if number != gone or gone == 3]
        assert answers([outboxes[number] for number in left]) == [wanted[number] for number in left]


def test_prompts_that_are_read_and_continued_ones_are_computed_alone(engine: Engine, batches: list[list[int]]) -> None:
    """Whose log-probabilities are asked for; a prompt that goes on with what the store has joins a batch."""
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
    assert several(batches) == [[40, 40]]
    assert all(fold(outbox).finish_reason == "length" for outbox in outboxes)
