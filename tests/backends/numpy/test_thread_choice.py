"""The number of threads of a step: what is faster, found with few slow steps, kept while it stays so."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from polarlm.engine import SamplingParams
from polarlm.engine.backends.numpy.cores import Cores, cores
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.numpy.thread_choice import _AGAIN, _AT_MOST, VARIABLES, StepThreads, ThreadChoice
from polarlm.engine.outputs import Threads
from tests.backends.numpy.test_cores import Library
from tests.tiny import load_tiny


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


def test_an_idle_machine_uses_all_threads() -> None:
    choice = ThreadChoice(2)
    taken = drive(choice, 200, quiet)
    assert choice.chosen == 2
    assert taken[0] == 2
    assert taken.count(1) == 6
    assert set(taken[13:]) == {2}


def test_a_busy_machine_uses_one_thread_after_three_slow_steps() -> None:
    choice = ThreadChoice(2)
    taken = drive(choice, 200, busy)
    assert choice.chosen == 1
    assert taken.count(2) == 3  # the first step of all is not counted
    assert set(taken[6:]) == {1}
    assert choice.medians == {1: 0.048, 2: 0.5}


def test_one_slow_step_does_not_decide() -> None:
    times = iter([0.03, 0.03, 0.9, 0.03, 0.03, 0.03, 0.05, 0.05, 0.05, 0.05])
    choice = ThreadChoice(2)
    drive(choice, 9, lambda number: 0.05 if number == 1 else next(times))
    assert choice.chosen == 2


def test_a_gain_of_a_tenth_does_not_change_the_number() -> None:
    choice = ThreadChoice(4)
    drive(choice, 3000, lambda number: 0.9 if number == 1 else 1.0)
    assert choice.chosen == 4


def test_a_slowdown_starts_a_comparison_at_once() -> None:
    choice = ThreadChoice(2)
    drive(choice, 50, quiet)
    taken = drive(choice, 30, busy)
    assert choice.chosen == 1
    assert taken.index(1) <= 8
    assert taken.count(2) <= 10


def test_a_growing_context_starts_one_comparison_per_doubling() -> None:
    choice = ThreadChoice(2)
    lengths = itertools.count(100)
    taken = drive(choice, 200, lambda number: next(lengths) * quiet(number))
    assert choice.chosen == 2
    assert taken.count(1) <= 12  # 100 to 300: at the start, and once more


def test_a_machine_that_becomes_idle_uses_all_threads_again() -> None:
    choice = ThreadChoice(2)
    drive(choice, 100, busy)
    taken = drive(choice, 2 * _AGAIN, quiet)
    assert choice.chosen == 2
    assert taken.index(2) <= _AGAIN


def test_comparisons_that_change_nothing_become_rare() -> None:
    """Where all threads are ten times slower, comparisons cost less than 1.5 % of the time."""
    choice = ThreadChoice(2)
    taken = drive(choice, 20_000, busy)
    assert choice.chosen == 1
    assert 20_000 / _AT_MOST < taken.count(2) < 30
    assert sum(map(busy, taken)) < 1.015 * 20_000 * busy(1)


def test_noise_between_equal_numbers_changes_the_choice_twice_at_most() -> None:
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
    for name in VARIABLES:
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


def test_blas_has_the_chosen_number_only_during_steps(machine: SimpleNamespace, unset: None) -> None:
    steps = machine.steps()
    assert steps.last() == Threads(2, "not measured yet")
    assert machine.run(steps) == 1
    assert machine.library.num_threads == 2  # prompts have them all
    assert steps.last() == Threads(1, "a step took 48.0 ms with 1, 500.0 ms with 2")


def test_steps_of_more_sequences_have_their_own_choice(machine: SimpleNamespace, unset: None) -> None:
    steps = machine.steps()
    assert machine.run(steps, rows=1) == 1
    machine.seconds = quiet
    assert machine.run(steps, rows=8) == 2
    assert machine.run(steps, rows=1) == 1  # steps that got no slower


def test_with_threads_set_nothing_is_measured(machine: SimpleNamespace, unset: None) -> None:
    steps = machine.steps(is_set=True)
    machine.run(steps)
    assert set(machine.taken) == {2}
    assert steps.last() == Threads(2, "by the setting threads")


@pytest.mark.parametrize("name", VARIABLES)
def test_with_a_variable_set_nothing_is_measured(machine: SimpleNamespace, unset: None, monkeypatch, name: str) -> None:
    monkeypatch.setenv(name, "2")
    steps = machine.steps()
    machine.run(steps)
    assert set(machine.taken) == {2}
    assert steps.last() == Threads(2, f"by {name}")


def test_with_one_thread_nothing_is_measured(machine: SimpleNamespace, unset: None) -> None:
    machine.library.num_threads = 1
    steps = machine.steps()
    machine.run(steps)
    assert steps.last() == Threads(1, "BLAS has no more")


def test_a_failed_step_is_not_timed_and_restores_all_threads(machine: SimpleNamespace, unset: None) -> None:
    steps = machine.steps()
    machine.run(steps)

    def fails() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        steps.run(1, fails)
    assert machine.library.num_threads == 2


def test_measuring_does_not_change_an_engine_s_answer(tiny_path, unset: None, monkeypatch) -> None:
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
            with load_tiny(tiny_path, ops=NumpyOps(threads), calibration=False) as engine:
                answers.append(engine.generate([7, 8, 9], params).token_ids)
                status = engine.status()
        assert answers[0] == answers[1]
        assert set(taken[:59]) == {1}
        assert set(taken[59:]) == {1, 2}
        assert status.threads is not None
        assert status.threads.why.startswith("a step took")
    finally:
        cores().use(before)
