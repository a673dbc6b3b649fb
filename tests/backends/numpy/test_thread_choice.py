"""The number of threads of a step: what is faster, found with few slow steps, kept while it stays so."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from engine import Engine, SamplingParams
from engine.backends.numpy.cores import Cores, cores
from engine.backends.numpy.thread_choice import _AGAIN, _AT_MOST, _VARIABLES, StepThreads, ThreadChoice
from engine.outputs import Threads
from tests.backends.numpy.test_cores import Library


def drive(choice: ThreadChoice, steps: int, seconds: Callable[[int], float]) -> list[int]:
    """The numbers of so many steps, each of which takes `seconds` of its number."""
    taken = []
    for _ in range(steps):
        taken.append(choice.number)
        choice.took(seconds(taken[-1]))
    return taken


def quiet(number: int) -> float:
    return {1: 0.048, 2: 0.029}[number]


def busy(number: int) -> float:
    return {1: 0.048, 2: 0.5}[number]


def test_a_quiet_machine_takes_all_threads() -> None:
    choice = ThreadChoice(2)
    taken = drive(choice, 200, quiet)
    assert choice.chosen == 2
    assert taken[0] == 2
    assert taken.count(1) == 6
    assert set(taken[13:]) == {2}


def test_a_busy_machine_takes_one_after_three_slow_steps() -> None:
    choice = ThreadChoice(2)
    taken = drive(choice, 200, busy)
    assert choice.chosen == 1
    assert taken.count(2) == 3  # the first step of all is not counted
    assert set(taken[6:]) == {1}
    assert choice.medians == {1: 0.048, 2: 0.5}


def test_a_step_that_lost_its_core_once_does_not_decide() -> None:
    times = iter([0.03, 0.03, 0.9, 0.03, 0.03, 0.03, 0.05, 0.05, 0.05, 0.05])
    choice = ThreadChoice(2)
    drive(choice, 9, lambda number: 0.05 if number == 1 else next(times))
    assert choice.chosen == 2


def test_nearly_the_same_is_no_reason_to_change() -> None:
    choice = ThreadChoice(4)
    drive(choice, 3000, lambda number: 0.9 if number == 1 else 1.0)
    assert choice.chosen == 4


def test_steps_that_get_slow_are_a_reason_to_compare_at_once() -> None:
    choice = ThreadChoice(2)
    drive(choice, 50, quiet)
    taken = drive(choice, 30, busy)
    assert choice.chosen == 1
    assert taken.index(1) <= 8
    assert taken.count(2) <= 10


def test_steps_that_get_slow_with_the_context_are_compared_once_for_each_doubling() -> None:
    choice = ThreadChoice(2)
    lengths = itertools.count(100)
    taken = drive(choice, 200, lambda number: next(lengths) * quiet(number))
    assert choice.chosen == 2
    assert taken.count(1) <= 12  # 100 to 300: at the start, and once more


def test_a_machine_that_is_quiet_again_is_found_out() -> None:
    choice = ThreadChoice(2)
    drive(choice, 100, busy)
    taken = drive(choice, 2 * _AGAIN, quiet)
    assert choice.chosen == 2
    assert taken.index(2) <= _AGAIN


def test_what_goes_on_costs_ever_less() -> None:
    """Ten times slower with all threads: less than a hundredth of the time goes into knowing that."""
    choice = ThreadChoice(2)
    taken = drive(choice, 20_000, busy)
    assert choice.chosen == 1
    assert 20_000 / _AT_MOST < taken.count(2) < 30
    assert sum(map(busy, taken)) < 1.015 * 20_000 * busy(1)


def test_a_choice_does_not_flap_between_two_that_are_equal() -> None:
    noise = itertools.cycle([1.0, 1.3, 0.8, 1.1, 0.9, 1.25, 0.7])
    choice = ThreadChoice(2)
    changes, before = 0, choice.chosen
    for _ in range(10_000):
        choice.took(next(noise))
        changes += choice.chosen != before
        before = choice.chosen
    assert changes <= 2


# -- an engine's steps ---------------------------------------------------------------------------------------------


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine() -> SimpleNamespace:
    """Two threads of BLAS, and a clock that goes by what a step takes with what BLAS may use."""
    library, now = Library(2), [0.0]
    given = SimpleNamespace(library=library, seconds=busy, taken=[])

    def work() -> int:
        given.taken.append(library.num_threads)
        now[0] += given.seconds(library.num_threads)
        return library.num_threads

    shared = Cores([library])  # type: ignore[list-item]
    given.steps = lambda is_set=False: StepThreads(shared, is_set, lambda: now[0])
    given.run = lambda steps, rows=1: [steps.run(rows, work) for _ in range(20)][-1]
    return given


def test_blas_has_the_number_that_was_chosen_during_steps_alone(machine: SimpleNamespace, unset: None) -> None:
    steps = machine.steps()
    assert steps.last() == Threads(2, "not measured yet")
    assert machine.run(steps) == 1
    assert machine.library.num_threads == 2  # prompts have them all
    assert steps.last() == Threads(1, "a step took 48.0 ms with 1, 500.0 ms with 2")


def test_more_sequences_are_a_choice_of_their_own(machine: SimpleNamespace, unset: None) -> None:
    steps = machine.steps()
    assert machine.run(steps, rows=1) == 1
    machine.seconds = quiet
    assert machine.run(steps, rows=8) == 2
    assert machine.run(steps, rows=1) == 1  # steps that got no slower


def test_a_number_that_is_set_is_not_measured(machine: SimpleNamespace, unset: None) -> None:
    steps = machine.steps(is_set=True)
    machine.run(steps)
    assert set(machine.taken) == {2}
    assert steps.last() == Threads(2, "by the setting threads")


@pytest.mark.parametrize("name", _VARIABLES)
def test_a_variable_sets_it_too(machine: SimpleNamespace, unset: None, monkeypatch, name: str) -> None:
    monkeypatch.setenv(name, "2")
    steps = machine.steps()
    machine.run(steps)
    assert set(machine.taken) == {2}
    assert steps.last() == Threads(2, f"by {name}")


def test_one_thread_is_all_there_is(machine: SimpleNamespace, unset: None) -> None:
    machine.library.num_threads = 1
    steps = machine.steps()
    machine.run(steps)
    assert steps.last() == Threads(1, "BLAS has no more")


def test_a_step_that_fails_is_not_counted_and_leaves_all_threads(machine: SimpleNamespace, unset: None) -> None:
    steps = machine.steps()
    machine.run(steps)

    def fails() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        steps.run(1, fails)
    assert machine.library.num_threads == 2


def test_an_engine_answers_the_same_while_it_measures(tiny_path, unset: None, monkeypatch) -> None:
    """One sequence of this model has the same tokens with one thread and with two."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    before, taken = cores().number, []
    run = StepThreads.run

    def watched(self: StepThreads, rows: int, work: Callable[[], object]) -> object:
        def counted() -> object:
            taken.append(cores()._now)
            return work()

        return run(self, rows, counted)

    monkeypatch.setattr(StepThreads, "run", watched)
    try:
        answers = []
        for threads in (1, 0):
            cores().use(2)
            with Engine.load(tiny_path, device="cpu", threads=threads, calibration=False) as engine:
                answers.append(engine.generate([7, 8, 9], params).token_ids)
                status = engine.status()
        assert answers[0] == answers[1]
        assert set(taken[:59]) == {1}
        assert set(taken[59:]) == {1, 2}
        assert status.threads is not None
        assert status.threads.why.startswith("a step took")
    finally:
        cores().use(before)
