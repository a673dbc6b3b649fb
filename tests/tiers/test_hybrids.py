"""What tiers hold of recurrent layers: the next engine's text is right, however the one that wrote it ended."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine.storage.objects import unpack
from polarlm.engine.storage.tiers import tier_store
from polarlm.engine.storage.tiers.tier_store import Folder
from tests.hybrids import MODELS, Load, N, alone, answer, ids_of, loading
from tests.requests.test_forks import PATIENCE
from tests.tiers.test_remote import Store, running
from tests.tiny import assert_idle, forget


@pytest.fixture(params=MODELS)
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Load]:
    (tmp_path / "model").mkdir()
    with loading(tmp_path / "model", request.param) as load:
        yield load


PROMPT = ids_of(9 * N + 6)


def on_disk(folder: Path) -> dict[str, Any]:
    return {"cache_disk": "50M", "cache_disk_folder": str(folder)}


def killed(work: Callable[[], Any]) -> bool:
    """Whether a forked process has died of a signal at `work`, rather than ended it."""
    child = os.fork()
    if not child:
        signal.alarm(PATIENCE)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, "the writer hangs"
    else:
        assert os.WEXITSTATUS(status) == 0, "the writer failed"
    return os.WIFSIGNALED(status)


def dies(patch: pytest.MonkeyPatch, writes: int, *, within: bool) -> None:
    """Let this process die at its object of number `writes`: halfway through it, or when it has its name."""
    unfinished, replace, left = Folder._unfinished, os.replace, [writes]

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def half(folder: Folder, *parts: bytes | memoryview) -> str:
        if len(parts) == 2 and within and not left[0]:
            unfinished(folder, parts[0], parts[1][: len(parts[1]) // 2])
            die()
        return unfinished(folder, *parts)

    def named(*names: str) -> None:
        replace(*names)
        if not left[0]:
            die()
        left[0] -= 1

    patch.setattr(Folder, "_unfinished", half)
    patch.setattr(tier_store.os, "replace", named)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("within", [True, False])
def test_an_engine_killed_at_any_object_leaves_what_the_next_one_can_use(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    """Blocks, snapshots and the current block are written in this order: at first there is no state to go on from."""
    own, more = answer(load(), PROMPT).token_ids, ids_of(7, seed=1)
    turns = [[*PROMPT, *own, *more], [*PROMPT, *more]]
    wanted, found = [alone(load, turn) for turn in turns], []

    def write(folder: Path, writes: int) -> None:
        engine = load(**on_disk(folder))
        dies(monkeypatch, writes, within=within)
        answer(engine, PROMPT)
        engine.close()

    for writes in range(100):
        folder = tmp_path / str(writes)
        if not killed(partial(write, folder, writes)):
            break
        for file in folder.iterdir():
            if not file.name.startswith("."):
                unpack(bytes.fromhex(file.name), file.read_bytes())
        engine = load(**on_disk(folder))
        answers = [answer(engine, turn) for turn in turns]
        assert [one.token_ids for one in answers] == wanted
        assert_idle(engine)
        engine.close()
        found.append(answers[0].usage.cached_tokens)
        assert not list(folder.glob(".unfinished-*"))  # what was not finished is gone
        assert answer(load(**on_disk(folder)), turns[0]).usage.cached_tokens == (len(turns[0]) - 1) // N * N
    assert found == sorted(found)
    snapshots = {5 * N, 9 * N}  # those of the prompt
    assert set(found) == {0} | snapshots | (set() if within else {len(turns[0]) - len(more) - 1})


def test_another_engine_goes_on(load: Load) -> None:
    with running(Store()) as store:
        settings = {"cache_remote": store.url}
        engine = load(**settings)
        whole = [*PROMPT, *answer(engine, PROMPT).token_ids[:-1]]
        engine.close()
        prompt = [*whole, *ids_of(9, seed=1)]
        found = answer(load(**settings), prompt)
        assert found.usage.cached_from == {"remote": len(whole)}
        assert found.token_ids == alone(load, prompt)


def test_snapshots_that_are_reused_before_they_are_written_are_copied(
    load: Load, tmp_path: Path, may_write: threading.Event
) -> None:
    engine = load(**on_disk(tmp_path))
    whole = [*PROMPT, *answer(engine, PROMPT).token_ids[:-1]]
    forget(engine)
    may_write.set()
    assert engine._tiers._writer.flush(PATIENCE)
    prompt = [*whole, *ids_of(9, seed=1)]
    found = answer(engine, prompt)
    assert found.usage.cached_from == {"disk": len(whole)}
    assert found.token_ids == alone(load, prompt)


@pytest.mark.parametrize("fault", ["changed", "that of another place"])
def test_a_snapshot_that_cannot_be_used_costs_the_tokens_since_the_one_before_it(
    load: Load, tmp_path: Path, fault: str
) -> None:
    """Though the keys and values beside it are whole."""
    prompt = [*PROMPT[: 9 * N], *ids_of(20, seed=1)]
    wanted = alone(load, prompt)
    for faulty, cached in (([8], 5 * N), ([4, 8], 0)):  # numbers of blocks with a snapshot at their end
        folder = tmp_path / str(cached)
        engine = load(**on_disk(folder))
        answer(engine, PROMPT, tokens=2)
        _, hashes = engine._prefixes.hashes(PROMPT)
        names = engine._tiers._named_soon()
        engine.close()
        files = [folder / names.state(key).hex() for key in hashes]
        assert [number for number, file in enumerate(files) if file.exists()] == [4, 8]
        contents = {number: bytearray(files[number].read_bytes()) for number in (4, 8)}
        for number in faulty:
            content = contents[number]
            if fault == "that of another place":
                files[number].write_bytes(contents[12 - number])
            else:
                content[len(content) // 2] ^= 0x10
                files[number].write_bytes(content)
        found = answer(load(**on_disk(folder)), prompt)
        assert found.usage.cached_tokens == cached
        assert found.token_ids == wanted


def test_snapshots_of_another_model_are_not_found(load: Load, tmp_path: Path) -> None:
    """Of the same shape, with one other bit in a recurrent layer."""
    engine = load(**on_disk(tmp_path / "disk"))
    answer(engine, PROMPT, tokens=2)
    engine.close()
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    start, _ = next(of["data_offsets"] for name, of in header.items() if name.endswith("A_log"))
    content[8 + size + start] ^= 1
    weights.write_bytes(content)
    prompt = [*PROMPT, *ids_of(9, seed=1)]
    found = answer(load(**on_disk(tmp_path / "disk")), prompt)
    assert found.usage.cached_tokens == 0
    assert found.token_ids == alone(load, prompt)
