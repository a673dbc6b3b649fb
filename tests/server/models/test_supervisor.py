"""Which models are in memory: with processes that only say what they need."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import EngineError
from polarlm.engine.loading.need import Need
from polarlm.server.config import ServerConfig
from polarlm.server.models import supervisor as module
from polarlm.server.models.process import FAILED, LOADING, READY, STOPPING, UNLOADED, WAITING_FOR_MEMORY, ModelSlot
from polarlm.server.models.registry import Registry
from polarlm.server.models.supervisor import Supervisor
from polarlm.server.running.refusals import Refusal
from tests.server.models.running import common

pytestmark = pytest.mark.anyio

GIB = 1 << 30


class Machine:
    """What the processes of a test see: a memory, in which loaded models take a GiB each, or what `sizes` says."""

    def __init__(self) -> None:
        self.free = 100 * GIB
        self.sizes: dict[str, int] = {}
        self.running: list[FakeProcess] = []
        self.let = asyncio.Event()  # models are loaded once it is set
        self.let.set()
        self.held: dict[
            tuple[str, str], asyncio.Event
        ] = {}  # by model and step: its process hangs there until it is set
        self.fails: Exception | None = None


class FakeProcess:
    pid = 0  # no process has it

    fetching = None

    def __init__(self, machine: Machine, name: str, on_exit: Callable[[int], None]) -> None:
        self.machine, self.name, self._on_exit = machine, name, on_exit
        self.has_taken = False  # the memory of its model
        self.size = machine.sizes.get(name, GIB)
        machine.running.append(self)

    async def _step(self, step: str) -> None:
        if (held := self.machine.held.get((self.name, step))) is not None:
            await held.wait()
        await asyncio.sleep(0)
        if self not in self.machine.running:
            raise Refusal("model_ended", "killed")

    async def fetch(self) -> Path:
        await self._step("fetched")
        return Path(self.name)

    async def need(self, reserved: Mapping[str, int], most: int | None) -> Need:
        free = self.machine.free - sum(one.size for one in self.machine.running if one.has_taken)
        await self._step("need")
        fits = self.size <= free - reserved.get("cuda", 0) and (most is None or self.size <= most)
        return Need("cuda", self.size, 0, 64 if fits else 0, fits, free)

    async def load(self) -> None:
        await self._step("load")
        await self.machine.let.wait()
        if self.machine.fails is not None:
            raise self.machine.fails
        self.has_taken = True

    async def end(self) -> None:
        with suppress(Refusal):  # it has ended already
            await self._step("end")
        self.kill()

    async def end_at_once(self) -> None:
        self.kill()

    def kill(self, code: int = -9) -> None:
        if self in self.machine.running:
            self.machine.running.remove(self)
            self._on_exit(code)

    async def exit_code(self) -> int:
        return -9


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(module, "ModelProcess", lambda model, _, on_exit, __: FakeProcess(made, model.name, on_exit))
    monkeypatch.setattr(module, "_SWEEP_SECONDS", 0.005)
    return made


@pytest.fixture
async def supervisor(
    machine: Machine, request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncGenerator[Supervisor, None]:
    """Of the models a, b and c, with the settings that `configured` names; it is closed when the test is done."""
    for name in "abc":
        (tmp_path / f"{name}.gguf").touch()
    config = ServerConfig(models=str(tmp_path), **getattr(request, "param", {}))
    made = Supervisor(Registry(common(), tmp_path, (), config.pin), config)
    yield made
    await made.close()
    assert not machine.running
    assert not [one.model.name for one in made.all() if one.active or one.waiters]


def configured(**settings: Any) -> pytest.MarkDecorator:
    """A test's supervisor has these settings of ServerConfig."""
    return pytest.mark.parametrize("supervisor", [settings], indirect=True, ids=str)


async def use(supervisor: Supervisor, name: str, keep: float | None = None) -> ModelSlot:
    slot = supervisor.find(name)
    await supervisor.acquire(slot)
    with supervisor.use(slot, keep):
        pass
    return slot


@asynccontextmanager
async def busy(supervisor: Supervisor, slot: ModelSlot, keep: float | None = None) -> AsyncGenerator[None, None]:
    await supervisor.acquire(slot)
    with supervisor.use(slot, keep):
        yield


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def loaded(supervisor: Supervisor) -> str:
    return "".join(one.model.name for one in supervisor.all() if one.state == READY)


async def test_the_model_that_was_not_used_for_longest_makes_room(supervisor: Supervisor, machine: Machine) -> None:
    machine.free = 2 * GIB
    for name in "aba":
        await use(supervisor, name)
    await use(supervisor, "c")
    assert loaded(supervisor) == "ac"


@configured(models_memory="512M")
async def test_a_model_that_no_limit_allows_is_refused_with_numbers(supervisor: Supervisor) -> None:
    with pytest.raises(EngineError, match=r"no room for a: it needs 1\.0 GiB.*512\.0 MiB of 512\.0 MiB") as caught:
        await use(supervisor, "a")
    assert caught.value.code == "out_of_memory"
    assert supervisor.find("a").state == FAILED


@configured(models_memory="1G", pin=("a",))
async def test_a_pinned_model_stays(supervisor: Supervisor) -> None:
    await use(supervisor, "a")
    with pytest.raises(EngineError, match="a stay, being pinned"):
        await use(supervisor, "b")
    assert loaded(supervisor) == "a"


@configured(models_memory="1G")
async def test_a_busy_model_answers_before_it_makes_room(supervisor: Supervisor, machine: Machine) -> None:
    slot = await use(supervisor, "a")
    async with busy(supervisor, slot):
        other = asyncio.create_task(use(supervisor, "b"))
        await until(lambda: slot.state == STOPPING)
        again = asyncio.create_task(use(supervisor, "a"))  # waits: it may not keep b from being loaded
        await asyncio.sleep(0.02)
        assert [one.name for one in machine.running] == ["a", "b"]
        assert not other.done()
    await asyncio.gather(other, again)
    assert loaded(supervisor) == "a"


@configured(models_memory="2G")
async def test_an_idle_model_makes_room_before_a_busy_one(supervisor: Supervisor) -> None:
    slot = await use(supervisor, "a")
    async with busy(supervisor, slot):
        await use(supervisor, "b")  # later than a
        await use(supervisor, "c")
        assert loaded(supervisor) == "ac"


async def test_without_others_to_unload_a_model_tries_what_there_is(supervisor: Supervisor, machine: Machine) -> None:
    """The engine takes a shorter context, or says what it lacks."""
    machine.free = GIB // 2
    await use(supervisor, "a")
    assert loaded(supervisor) == "a"


@configured(idle_unload=0.001)
async def test_idle_models_are_unloaded(supervisor: Supervisor) -> None:
    slot = await use(supervisor, "a", supervisor.default_keep(supervisor.find("a")))
    assert slot.expires is not None
    await use(supervisor, "b", None)  # as long as there is room
    await use(supervisor, "c", 0)
    async with busy(supervisor, slot, 0.02):
        await asyncio.sleep(0.05)
        assert slot.state == READY
    await until(lambda: loaded(supervisor) == "b")


@configured(pin=("a",))
async def test_a_pinned_model_is_never_idle(supervisor: Supervisor) -> None:
    slot = await use(supervisor, "a", 0.0)
    await use(supervisor, "b", 0.001)
    await until(lambda: supervisor.find("b").state == UNLOADED)
    assert (slot.state, slot.expires) == (READY, None)


async def test_a_crash_is_that_of_one_model_and_the_next_request_starts_it_again(
    supervisor: Supervisor, machine: Machine
) -> None:
    slot, other = await use(supervisor, "a"), await use(supervisor, "b")
    machine.running[0].kill()
    assert (slot.state, other.state) == (FAILED, READY)
    assert "SIGKILL" in str(slot.error)
    await use(supervisor, "a")
    assert (slot.state, slot.error, slot.starts) == (READY, None, 2)


@configured(models_memory="1G")
async def test_a_crash_ends_the_wait_for_a_busy_model(supervisor: Supervisor, machine: Machine) -> None:
    slot = await use(supervisor, "a")
    async with busy(supervisor, slot):
        other = asyncio.create_task(use(supervisor, "b"))
        await until(lambda: slot.state == STOPPING)
        machine.running[0].kill()
        await other
    assert (loaded(supervisor), slot.state) == ("b", FAILED)


async def test_everybody_who_waits_hears_why_a_model_cannot_be_loaded(supervisor: Supervisor, machine: Machine) -> None:
    machine.fails = EngineError("a.gguf is cut off", "model_unavailable")
    heard = await asyncio.gather(*(use(supervisor, "a") for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in heard] == ["a.gguf is cut off"] * 3
    assert not machine.running
    machine.fails = None
    await use(supervisor, "a")


async def test_a_client_that_goes_while_its_model_is_loaded_holds_nothing(
    supervisor: Supervisor, machine: Machine
) -> None:
    machine.let.clear()
    slot = supervisor.find("a")
    one, other = (asyncio.create_task(supervisor.acquire(slot)) for _ in range(2))
    await until(lambda: slot.state == LOADING and len(machine.running) == 1)
    one.cancel()
    machine.let.set()
    await other
    assert (slot.state, slot.active) == (READY, 1)
    supervisor.release(slot)


async def test_a_process_may_end_before_the_request_that_it_was_started_for_reaches_it(
    supervisor: Supervisor, machine: Machine
) -> None:
    slot = supervisor.find("a")
    await supervisor.acquire(slot)
    machine.running[0].kill()
    with pytest.raises(Refusal, match="The process of a has ended"), supervisor.use(slot, None):
        pass
    assert (slot.state, slot.active) == (FAILED, 0)
    await use(supervisor, "a")
    assert slot.starts == 2


# -- what one model waits for, others do not ---------------------------------------------------------------------------

STEPS = ("fetched", "need", "load")


async def hang(supervisor: Supervisor, machine: Machine, name: str, step: str) -> asyncio.Task[ModelSlot]:
    """A request whose model's process hangs in a step of its load."""
    machine.held[name, step] = asyncio.Event()
    waits = asyncio.create_task(use(supervisor, name))
    await until(lambda: any(one.name == name for one in machine.running))
    return waits


@pytest.mark.parametrize("step", STEPS)
@configured(models_memory="2G")
async def test_a_load_that_hangs_keeps_no_other_from_loading_until_it_is_given_up(
    supervisor: Supervisor, machine: Machine, step: str
) -> None:
    waits = await hang(supervisor, machine, "a", step)
    await use(supervisor, "b")
    supervisor.give_up(supervisor.find("a"))
    again = asyncio.create_task(use(supervisor, "a"))  # a request after that loads it
    del machine.held["a", step]
    with pytest.raises(Refusal, match="a was unloaded before it was loaded") as caught:
        await waits
    assert (caught.value.code, (await again).starts) == ("model_not_loaded", 2)


@configured(models_memory="1G")
async def test_the_memory_of_a_model_that_is_being_loaded_is_counted(supervisor: Supervisor, machine: Machine) -> None:
    waits, slot = await hang(supervisor, machine, "a", "load"), supervisor.find("b")
    other = asyncio.create_task(use(supervisor, "b"))
    await until(lambda: slot.state == WAITING_FOR_MEMORY)
    supervisor.give_up(supervisor.find("a"))
    await other
    with pytest.raises(Refusal):
        await waits


@configured(models_memory="1G")
async def test_of_two_that_see_the_same_room_one_has_it(supervisor: Supervisor, machine: Machine) -> None:
    for name in "ab":
        machine.held[name, "need"] = asyncio.Event()
    both = [asyncio.create_task(use(supervisor, name)) for name in "ab"]
    await until(lambda: len(machine.running) == 2)
    for held in machine.held.values():
        held.set()
    await asyncio.gather(*both)
    assert len(machine.running) == 1


@configured(models_memory="2G")
async def test_while_a_model_ends_its_answers_others_are_loaded(supervisor: Supervisor) -> None:
    slot = await use(supervisor, "a")
    async with busy(supervisor, slot, keep=0):
        supervisor.give_up(slot)
        again = asyncio.create_task(use(supervisor, "a"))
        await asyncio.sleep(0)
        await use(supervisor, "b")
        assert slot.state == STOPPING
    await again  # which the end of the answer, with keep_alive 0, does not give up
    assert loaded(supervisor) == "ab"


@configured(models_memory="3G")
async def test_who_fits_beside_a_model_that_waits_for_a_busy_one_is_loaded(
    supervisor: Supervisor, machine: Machine
) -> None:
    machine.sizes = {"a": 2 * GIB, "b": 2 * GIB}
    slot = await use(supervisor, "a")
    async with busy(supervisor, slot):
        large = asyncio.create_task(use(supervisor, "b"))
        await until(lambda: slot.state == STOPPING)
        await use(supervisor, "c")
        assert not large.done()
    await large
    assert loaded(supervisor) == "bc"


@configured(models_memory="1G")
async def test_room_goes_to_those_who_have_waited_longest(supervisor: Supervisor, machine: Machine) -> None:
    slot, loads = await use(supervisor, "a"), []
    async with busy(supervisor, slot):
        for name in "bc":
            loads.append(supervisor.begin_load(supervisor.find(name)))
            await until(lambda name=name: supervisor.find(name).state == WAITING_FOR_MEMORY)  # type: ignore[misc]
        machine.held["b", "need"] = asyncio.Event()
    await until(lambda: slot.state == UNLOADED)
    await asyncio.sleep(0.01)
    assert supervisor.find("c").state == WAITING_FOR_MEMORY  # although its process answers at once
    machine.held["b", "need"].set()
    await loads[0]
    assert loaded(supervisor) == "b"
    await loads[1]


@configured(models_memory="2G", idle_unload=0.001)
async def test_whatever_clients_do_in_the_end_everything_is_loaded_and_unloaded(
    supervisor: Supervisor, machine: Machine
) -> None:
    chance = random.Random(7)
    machine.sizes = {"c": 2 * GIB}

    async def client() -> None:
        for _ in range(40):
            slot, asked = supervisor.find(chance.choice("abc")), chance.random()
            if asked < 0.15:
                supervisor.give_up(slot)
            elif asked < 0.25 and machine.running:
                chance.choice(machine.running).kill()
            else:
                using = asyncio.create_task(use(supervisor, slot.model.name, chance.choice([None, 0, 0.001])))
                await asyncio.wait([using], timeout=chance.choice([0.001, 10]))
                using.cancel()
                with suppress(Refusal, asyncio.CancelledError):
                    await using
            assert sum(one.size for one in machine.running if one.has_taken) <= 2 * GIB
            await asyncio.sleep(chance.choice([0, 0.001]))

    await asyncio.gather(*(client() for _ in range(8)))
    for name in "abc":
        await use(supervisor, name, 0)
    await until(lambda: not machine.running)


@pytest.mark.parametrize("step", STEPS)
@configured(models_memory="2G")
async def test_closing_ends_those_who_wait_and_all_processes(
    supervisor: Supervisor, machine: Machine, step: str
) -> None:
    slot = await use(supervisor, "a")
    async with busy(supervisor, slot):
        supervisor.give_up(slot)  # its next load waits for the end of this answer
        hangs = await hang(supervisor, machine, "b", step)
        machine.sizes["c"] = 2 * GIB  # it waits for memory
        waits = [hangs, *(asyncio.create_task(use(supervisor, name)) for name in "ac")]
        await until(lambda: supervisor.find("c").state == WAITING_FOR_MEMORY)
        await supervisor.close()
    for waiting in waits:
        with pytest.raises(Refusal, match="about to end"):
            await waiting
    with pytest.raises(Refusal, match="about to end"):
        await use(supervisor, "c")


async def test_without_a_name_the_model_that_was_used_last_is_meant(supervisor: Supervisor) -> None:
    assert supervisor.find("").model.name == "a"
    for name in "cb":
        await use(supervisor, name)
    assert supervisor.find("").model.name == "b"
    with pytest.raises(Refusal, match="no model called d; there are: a, b, c"):
        supervisor.find("d")
