"""Drafts among everything else that happens to requests: arrivals, prefix hits, preemption, cancellation, sessions."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from polarlm import Engine, EngineError, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.outputs import fold
from polarlm.engine.requests.drafts import Drafts
from polarlm.engine.requests.request import Ticket
from polarlm.engine.state.cache_types import PRESETS, Preset
from tests.eagle3 import DRAFTED_IDS, make_head
from tests.mtp import Beside, make_mtp
from tests.requests.drafters import ANEW, Known, Unpaced, drafting, first_difference, margin
from tests.requests.test_assistants import with_assistant
from tests.tiny import VOCABULARY, blocks_left, load_tiny, make_model

BLOCK = 8
SETTINGS: dict[str, Any] = {"block_size": BLOCK, "cache_type": "recent", "parallel": 3, "ctx_size": 160}
CLOSE = 0.02  # nats: full precision everywhere, but products of several rows are rounded otherwise
TOKENS = st.lists(st.integers(5, VOCABULARY - 1), min_size=20, max_size=50)
TURNS = st.lists(st.integers(5, VOCABULARY - 1), min_size=1, max_size=9)  # most are rows of a step


@dataclass
class RecordedRequest:
    prompt: list[int]
    params: SamplingParams
    wanted: tuple[int, ...]  # tokens of a plain run
    ticket: Ticket | None = None
    tray: list[Any] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.tray for token in chunk.token_ids)


@pytest.fixture(autouse=True)
def _preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose codes are in full precision, too, so that a block may become old at any time."""
    monkeypatch.setitem(PRESETS, "recent", Preset("f16", "f16", 1))


class Schedules(RuleBasedStateMachine):
    """Each answer equals a plain run's; a cancelled answer is its beginning. No block is lost."""

    preempted = drafted = saved = joined = 0
    model, blocks = "llama_gqa_linear", 10  # the longest answer needs nine
    more: Mapping[str, Any] = {}
    make = staticmethod(make_model)

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        path = self.make(folder, self.model)
        self.file = folder / "session"
        self.plain: Engine = self.stack.enter_context(load_tiny(path, ops=NumpyOps(), **SETTINGS, **self.more))
        self.engine: Engine = self.stack.enter_context(load_tiny(path, ops=NumpyOps(), **SETTINGS, **self.more))
        attention = next(number for number, group in enumerate(self.engine._store.groups) if not group.is_sparse)
        self.stack.enter_context(blocks_left(self.engine, self.blocks, attention))
        record_time = self.engine._scheduler.record_time  # by count: the machine must do the same each time
        self.engine._scheduler.record_time = lambda unit, _: record_time(unit, 1)  # type: ignore[method-assign]
        preempt = self.engine._scheduler.preempt

        def counted() -> Any:
            Schedules.preempted += 1
            return preempt()

        self.engine._scheduler.preempt = counted  # type: ignore[method-assign]
        prefilled = self.engine._scheduler.end_prefill

        def joining(sequence: Any, missing: int = 0) -> None:
            Schedules.joined += missing > 1
            prefilled(sequence, missing)

        self.engine._scheduler.end_prefill = joining  # type: ignore[method-assign]
        self.asked: list[RecordedRequest] = []
        self.made: list[Unpaced] = []

    @rule(
        prompt=TOKENS,
        earlier=st.integers(0, 3),
        tokens=st.integers(5, 35),
        right=st.sampled_from([None, 0.0, 0.7, 0.95, 1.0]),
        seed=st.integers(0, 99),
    )
    def ask(self, prompt: list[int], earlier: int, tokens: int, right: float | None, seed: int) -> None:
        """A prompt of its own, or one that goes on with an answer. right: the share of right drafts; None has none."""
        done = [one for one in self.asked if one.tray and one.tray[-1].finish_reason == "length"]
        if earlier and done:
            last = done[seed % len(done)]
            prompt = [*last.prompt, *last.tokens, *prompt][:60]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        wanted = self.plain.generate(prompt, params, ANEW).token_ids
        one = RecordedRequest(prompt, params, wanted)
        rng = np.random.default_rng(seed)

        def make(ids: Sequence[int]) -> Drafts | None:
            if right is None:
                return None
            known = Known([*prompt, *wanted], right, VOCABULARY, seed)
            drafter = known if self.engine._model.mtp is None else Beside(self.engine, known)
            self.made.append(Unpaced(drafter, lambda: int(rng.integers(0, 16))))
            return self.made[-1]

        drafting(self.engine, make)
        one.ticket = self.engine.submit(prompt, params, into=one.tray)
        self.asked.append(one)

    @precondition(lambda self: self.asked)
    @rule(count=st.integers(1, 4))
    def work(self, count: int) -> None:
        for _ in range(count):
            self.engine.work()

    @precondition(lambda self: self.asked)
    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        one = self.asked[number % len(self.asked)]
        one.ticket.cancel()
        one.is_cancelled = True

    @rule(number=st.integers(0, 9), count=st.integers(1, 9))
    def evict(self, number: int, count: int) -> None:
        """Blocks, snapshots and slots that no request holds are not found any more."""
        groups = self.engine._store.groups
        group = groups[number % len(groups)]
        for allocator in (group.quantized, group.full):
            for block in allocator.allocate(min(count, allocator.free)):
                allocator.release(block)

    @invariant()
    def copies_are_bounded(self) -> None:
        waiting = [one.saved.bytes for one in self.engine._runner.requests.values() if one.saved is not None]
        assert sum(waiting) <= self.engine._store.plan.copy_bytes
        Schedules.saved += len(waiting)

    @rule()
    def session(self) -> None:
        """The newest sequence goes to a file and comes back, beside requests under way, which may leave no room; unless
        its first block has been evicted."""
        if self.engine._runner.newest.ids:
            with suppress(EngineError):
                stored = self.engine.save_session(self.file)
                assert len(self.engine.load_session(self.file).token_ids) == stored

    def teardown(self) -> None:
        try:
            while self.engine.work():
                pass
            assert_idle_but_taken(self.engine)
            for one in self.asked:
                place = first_difference(one.tokens, one.wanted[: len(one.tokens)])
                assert place is None or margin(self.plain, one.prompt, one.params, place) < CLOSE
                if not one.is_cancelled:
                    assert len(one.tokens) == len(one.wanted)
                    assert fold(one.tray).finish_reason == "length"
            Schedules.drafted += sum(drafts.accepted for drafts in self.made)
        finally:
            self.stack.close()


def assert_idle_but_taken(engine: Engine) -> None:
    """No request, and no slot or snapshot in use."""
    assert not engine._runner.requests
    assert engine._runner._batches.next_step is None
    groups = engine._store.groups
    assert all(group.full.free == group.full.size for group in groups)
    assert all(group.quantized.free == group.quantized.size for group in groups if group.is_sparse)


class WithTurns(Schedules):
    @rule(prompt=TURNS, earlier=st.integers(0, 3), tokens=st.integers(5, 35), seed=st.integers(0, 99))
    def turn(self, prompt: list[int], earlier: int, tokens: int, seed: int) -> None:
        self.ask(prompt, earlier, tokens, 0.95, seed)


class OfDeltaRules(Schedules):
    """Nothing is coded, so that an answer does not depend on the snapshot that it goes on from."""

    model = "qwen3_next_shared_keys"
    more: Mapping[str, Any] = {"state_type": "f32", "state_cache": "40k"}


class OfMamba2(OfDeltaRules):
    model = "nemotron_h_experts"


class OfMtp(OfDeltaRules):
    """With a layer whose K/V are in the same blocks."""

    more: Mapping[str, Any] = {**OfDeltaRules.more, "spec_type": "mtp"}
    make = staticmethod(make_mtp)


class OfEagle3(OfDeltaRules):
    """With a head whose K/V are in blocks of their own shape."""

    more: Mapping[str, Any] = {**OfDeltaRules.more, "spec_type": "eagle3"}

    @staticmethod
    def make(folder: Path, fixture: str) -> Path:
        make_head(folder / "head", make_model(folder, fixture), ids=DRAFTED_IDS)
        return folder


class OfAssistant(Schedules):
    """With layers that read the K/V of the model's."""

    model = "gemma4_shared_kv"
    blocks = 7  # of the group with a window
    more: Mapping[str, Any] = {"spec_type": "assistant"}
    make = staticmethod(lambda folder, fixture: with_assistant(folder, fixture)[0])


@pytest.mark.slow
@pytest.mark.parametrize("machine", [WithTurns, OfDeltaRules, OfMamba2, OfMtp, OfEagle3, OfAssistant])
def test_answers_are_those_of_plain_runs(machine: type[Schedules]) -> None:
    """With requests that are preempted, and drafts that are right. Each machine runs for half a minute."""
    Schedules.preempted = Schedules.drafted = Schedules.saved = Schedules.joined = 0
    usual = settings(max_examples=25, stateful_step_count=20, deadline=None, derandomize=True, database=None)
    run_state_machine_as_test(machine, settings=usual)
    assert Schedules.preempted > 0
    assert (Schedules.joined > 10) == (machine is WithTurns)  # recurrent layers have prompts
    assert Schedules.drafted > 200
    assert Schedules.saved > 0 or not issubclass(machine, OfDeltaRules)  # whose copies are back before the unit ends
