"""The scheduler: every request finishes, the oldest is never preempted, prefill and steps share the time."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine.requests.scheduler import Scheduler, TokenSequence, Unit
from polarlm.engine.state.blocks import BlockAllocator, OutOfBlocks


def sequences(count: int) -> list[TokenSequence]:
    return [TokenSequence((1,), -1) for _ in range(count)]


def running(scheduler: Scheduler, count: int) -> list[TokenSequence]:
    new = sequences(count)
    for sequence in new:
        scheduler.submit(sequence)
        scheduler.admit(sequence)
        scheduler.end_prefill(sequence)
    return new


def test_a_prompt_that_ends_before_the_one_that_is_prefilled_waits_no_more() -> None:
    """As in a batch whose first prompt has failed, or has no room."""
    scheduler = Scheduler(parallel=4)
    first, second = sequences(2)
    scheduler.submit(first)
    scheduler.submit(second)
    scheduler.admit(first)
    scheduler.end_prefill(second)
    assert (scheduler.prefilling, scheduler.running) == (1, 1)
    scheduler.remove(first)
    unit = scheduler.schedule()
    assert unit is not None
    assert (unit.is_prefill, unit.sequences) == (False, (second,))


def shared(scheduler: Scheduler, prompt: TokenSequence, seconds: dict[bool, float], units: int) -> list[bool]:
    """Whether each of the next `count` units is prefill; seconds: of a unit of prefill (True) and of a step (False)."""
    kinds = []
    for _ in range(units):
        unit = scheduler.schedule()
        if unit.is_prefill:
            scheduler.admit(prompt)
        scheduler.record_time(unit, seconds[unit.is_prefill])
        kinds.append(unit.is_prefill)
    return kinds


@pytest.mark.parametrize(
    ("answering", "waiting", "step", "share"),
    [
        (4, 2, 0.001, 0.5),
        (2, 6, 0.001, 0.75),
        (1, 19, 0.001, 0.9),
        (2, 6, 0.02, 0.05 / 0.08),  # three steps' time in prompts would be more than 50 ms without a token
        (2, 6, 0.2, 0.5),
    ],
)
def test_prefill_has_more_of_the_time_where_more_wait(answering: int, waiting: int, step: float, share: float) -> None:
    """As long as those who read along get a token every 50 ms, and half of the time."""
    scheduler = Scheduler(answering + waiting)
    running(scheduler, answering)
    new, *others = sequences(waiting)
    for sequence in (new, *others, *sequences(100)):  # for the last ones there is no room
        scheduler.submit(sequence)
    kinds = shared(scheduler, new, {True: step / 4, False: step}, 3000)
    of_prompts = step / 4 * sum(kinds)
    assert of_prompts / (of_prompts + step * (len(kinds) - sum(kinds))) == pytest.approx(share, abs=0.01)


def test_sequences_join_a_step_until_it_has_as_many_rows_of_prompts_as_one_may_have() -> None:
    scheduler = Scheduler(8)
    (answering,) = running(scheduler, 1)
    scheduler.record_time(Unit(False, (answering,)), 1)
    first, second, third = sequences(3)
    for sequence, missing in ((first, 15), (second, 15), (third, 1)):
        scheduler.submit(sequence)
        unit = scheduler.schedule()
        assert unit.is_prefill == (sequence is not third)
        assert unit.sequences == ((sequence,) if unit.is_prefill else (answering, first, second))
        if unit.is_prefill:
            scheduler.admit(sequence)
            scheduler.end_prefill(sequence, missing)
    assert scheduler.schedule() == Unit(True, (third,), (answering, first, second))


def test_running_sequences_do_not_wait_for_a_batch_that_has_their_step() -> None:
    """Batches follow one another as long as prompts wait."""
    scheduler = Scheduler(8)
    running(scheduler, 1)
    step = scheduler.schedule()
    scheduler.record_time(step, 1)
    for sequence in sequences(9):
        scheduler.submit(sequence)
    for _ in range(9):
        unit = scheduler.schedule()
        assert unit.is_prefill
        assert unit.running == step.sequences
        scheduler.take_step()
        scheduler.record_time(unit, 5)


def test_no_prefill_runs_before_a_slow_step_that_fills_a_block() -> None:
    """Such a step takes ten times as long here: between it and the step before it no prefill runs."""
    scheduler = Scheduler(8, block_size=16)
    (answering,) = running(scheduler, 1)
    (new,) = sequences(1)
    scheduler.submit(new)
    seen = []
    for _ in range(600):
        unit = scheduler.schedule()
        if unit.is_prefill:
            scheduler.record_time(unit, 0.25)
        else:
            assert unit.fills_a_block == (len(answering.ids) % 16 == 0)
            scheduler.record_time(unit, 10 if unit.fills_a_block else 1)
            answering.ids.append(1)
        seen.append(unit)
    filling = [number for number, unit in enumerate(seen) if unit.fills_a_block]
    assert len(filling) > 5
    assert not any(seen[number - 1].is_prefill for number in filling[1:])  # the first one is not expected yet
    seconds = [0.25 if unit.is_prefill else 10 if unit.fills_a_block else 1 for unit in seen]
    of_prompts = sum(s for s, unit in zip(seconds, seen, strict=True) if unit.is_prefill)
    assert 0.4 < of_prompts / sum(seconds) < 0.6


def test_prefill_earns_no_credit_while_there_is_no_prompt() -> None:
    scheduler = Scheduler(8)
    running(scheduler, 1)
    for _ in range(100):
        unit = scheduler.schedule()
        assert not unit.is_prefill
        scheduler.record_time(unit, 1)
    (new,) = sequences(1)
    scheduler.submit(new)
    # A late prompt gets as much time as one step has taken, not as much as all of them.
    assert shared(scheduler, new, {True: 0.5, False: 1}, 6) == [True, True, True, False, True, True]


def test_the_youngest_is_preempted_and_keeps_its_place_in_the_queue() -> None:
    scheduler = Scheduler(8)
    old, young = running(scheduler, 2)
    (new,) = sequences(1)
    scheduler.submit(new)
    assert scheduler.preempt() is young
    assert scheduler.preempt() is None  # the last one goes on
    assert [scheduler.schedule() for _ in range(3)] == [Unit(False, (old,))] * 3
    scheduler.remove(old)
    assert scheduler.schedule() == Unit(True, (young, new))


def test_a_requeued_sequence_waits_until_another_is_removed() -> None:
    scheduler = Scheduler(8)
    (old,) = running(scheduler, 1)
    first, second = sequences(2)
    scheduler.submit(first)
    scheduler.submit(second)
    assert scheduler.requeue(first)
    assert [scheduler.schedule() for _ in range(3)] == [Unit(False, (old,))] * 3
    scheduler.remove(old)
    assert scheduler.schedule() == Unit(True, (first, second))
    assert not scheduler.requeue(first)  # no running sequence could free blocks


def test_requests_of_the_least_priority_are_served_first_and_lose_their_room_last() -> None:
    scheduler = Scheduler(3)
    new = {priority: TokenSequence((1,), -1, priority=priority) for priority in (0, 5, -2, 1)}
    for sequence in new.values():
        scheduler.submit(sequence)
    unit = scheduler.schedule()
    assert unit == Unit(True, (new[-2], new[0], new[1]))
    for sequence in unit.sequences:
        scheduler.admit(sequence)
        scheduler.end_prefill(sequence)
    assert [scheduler.preempt(), scheduler.preempt(), scheduler.preempt()] == [new[1], new[0], None]


@dataclass
class Job:
    """A request of a simulated engine: prompt units of blocks, then a block every `pace` tokens."""

    in_background: bool
    prompt: int  # blocks
    tokens: int
    arrives: int
    cancelled: int | None
    priority: int
    held: list[int] = field(default_factory=list)
    done: int = 0


JOBS = st.lists(
    st.builds(
        Job,
        in_background=st.booleans(),
        prompt=st.integers(1, 6),
        tokens=st.integers(1, 12),
        arrives=st.integers(0, 40),
        cancelled=st.none() | st.integers(0, 60),
        priority=st.sampled_from([0, 0, 0, 1, -7]),
    ),
    min_size=1,
    max_size=12,
)
PACE = 3  # tokens in a block


@given(JOBS, st.integers(1, 4))
@settings(max_examples=60)
def test_every_request_finishes(jobs: list[Job], most: int) -> None:
    """Random arrivals, lengths, priorities and cancellations: all finish, no block leaks, and the oldest of the best
    priority is never preempted."""
    allocator = BlockAllocator(max(job.prompt + job.tokens // PACE + 1 for job in jobs))
    scheduler, alive = Scheduler(most), dict[TokenSequence, Job]()
    time, pending = 0, sorted(jobs, key=lambda job: job.arrives)

    def give_back(job: Job) -> None:
        for block in job.held:
            allocator.release(block)
        job.held = []

    def end(sequence: TokenSequence) -> None:
        give_back(alive.pop(sequence))
        scheduler.remove(sequence)

    def prefill(sequence: TokenSequence) -> None:
        job = alive[sequence]
        try:
            job.held += allocator.allocate(1)
        except OutOfBlocks:
            give_back(job)
            assert scheduler.requeue(sequence), "a request fits alone"
            return
        scheduler.admit(sequence)
        if len(job.held) >= job.prompt + job.done // PACE:
            scheduler.end_prefill(sequence)

    def step(unit: Unit) -> None:
        first = min(alive, key=lambda one: (one.in_background, one.priority, one.arrival))
        for sequence in unit.sequences:
            job = alive[sequence]
            while job.held and len(job.held) < job.prompt + (job.done + 1) // PACE:
                try:
                    job.held += allocator.allocate(1)
                except OutOfBlocks:
                    preempted = scheduler.preempt()
                    assert preempted is not None, "a request fits alone"
                    assert preempted is not first
                    give_back(alive[preempted])
            if job.held:
                job.done += 1
            if job.done == job.tokens:
                end(sequence)

    budget = 100 + 50 * sum(job.prompt + job.tokens for job in jobs)
    while pending or alive:
        while pending and pending[0].arrives <= time:
            kind = {"in_background": pending[0].in_background, "priority": pending[0].priority}
            sequence = TokenSequence((1,), -1, **kind)
            alive[sequence] = pending.pop(0)
            scheduler.submit(sequence)
        for sequence in [one for one, job in alive.items() if job.cancelled is not None and job.cancelled <= time]:
            end(sequence)
        while (hinderer := scheduler.hinderer) is not None:
            assert hinderer.in_background
            scheduler.suspend(hinderer)
            give_back(alive[hinderer])
        unit = scheduler.schedule()
        assert unit is not None or not alive, "a request waits and there is no unit"
        if unit is not None and unit.is_prefill:
            prefill(unit.sequences[0])
        elif unit is not None:
            step(unit)
        if unit is not None:
            scheduler.record_time(unit, 1)
        time += 1
        assert time < budget, "a request starves"
    assert allocator.free == allocator.size


@given(st.lists(st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)), min_size=50, max_size=50))
def test_prefill_delays_a_step_by_its_share_and_one_unit_at_most(
    times: list[tuple[float, float]],
) -> None:
    scheduler = Scheduler(7)
    running(scheduler, 4)  # more than wait: prefill has half of the time
    for sequence in sequences(3):
        scheduler.submit(sequence)
    steps: list[float] = []
    delay = allowed = longest = 0.0
    for prefill, step in times:
        unit = scheduler.schedule()
        if unit.is_prefill:
            scheduler.admit(unit.sequences[0])
            scheduler.record_time(unit, prefill)
            delay, longest = delay + prefill, max(longest, prefill)
            assert delay <= allowed + longest + 1e-9
        else:
            scheduler.record_time(unit, step)
            steps.append(step)
            usual = median(steps[-8:])
            room = 1.5 * usual - max(0.0, step - usual)
            delay, longest, allowed = 0.0, 0.0, max(0.0, room)


def background(scheduler: Scheduler, count: int) -> list[TokenSequence]:
    new = [TokenSequence((1,), -1, in_background=True) for _ in range(count)]
    for sequence in new:
        scheduler.submit(sequence)
    return new


def test_what_waits_in_the_background_is_admitted_after_all_others() -> None:
    scheduler = Scheduler(8)
    behind = background(scheduler, 2)
    ahead = sequences(2)
    for sequence in ahead:
        scheduler.submit(sequence)
    assert scheduler.schedule() == Unit(True, tuple(ahead))  # prompts of both kinds share no batch
    for sequence in ahead:
        scheduler.remove(sequence)
    assert scheduler.schedule() == Unit(True, tuple(behind))


def test_the_background_gives_way_only_where_another_would_wait_for_it() -> None:
    scheduler = Scheduler(2)
    first, second = background(scheduler, 2)
    for sequence in (first, second):
        scheduler.admit(sequence)
        scheduler.end_prefill(sequence)
    (third,) = background(scheduler, 1)
    assert scheduler.hinderer is None  # those of the background wait for each other
    (new,) = sequences(1)
    scheduler.submit(new)
    assert scheduler.hinderer is second
    assert scheduler.prefill_follows  # so that no step begins ahead with it
    scheduler.suspend(second)
    assert scheduler.hinderer is None
    assert scheduler.schedule() == Unit(True, (new,), (first,))
    scheduler.admit(new)
    scheduler.end_prefill(new)
    assert scheduler.schedule() == Unit(False, (new, first))
    scheduler.remove(new)
    scheduler.remove(first)
    assert scheduler.schedule() == Unit(True, (second, third))  # it has kept its place


def test_a_prompt_shares_no_time_with_steps_of_the_background() -> None:
    """Not even if a step has just taken long; a prompt of the background does."""
    for is_behind in (False, True):
        scheduler = Scheduler(8)
        for sequence in background(scheduler, 2):
            scheduler.admit(sequence)
            scheduler.end_prefill(sequence)
        for seconds in (1, 1, 1, 100):
            scheduler.record_time(scheduler.schedule(), seconds)
        new = background(scheduler, 1) if is_behind else sequences(1)
        if not is_behind:
            scheduler.submit(new[0])
        assert scheduler.schedule().is_prefill is not is_behind


def test_a_long_prompt_of_the_background_gives_way_and_so_do_its_blocks() -> None:
    scheduler = Scheduler(8)
    (long,) = background(scheduler, 1)
    scheduler.admit(long)
    (new,) = sequences(1)
    scheduler.submit(new)
    assert scheduler.hinderer is long
    scheduler.suspend(long)
    assert scheduler.schedule() == Unit(True, (new,))
    scheduler.remove(new)
    scheduler.admit(long)
    scheduler.end_prefill(long)
    scheduler.submit(new)
    assert scheduler.hinderer is None  # there is a place beside it,
    assert scheduler.requeue(new)
    assert scheduler.hinderer is long  # but there are no blocks
    scheduler.suspend(long)
    assert scheduler.schedule() == Unit(True, (new,))
