"""Sessions on disk: they go on as if nothing had been, and whatever is wrong with a file is a sentence."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.engine.loading.encoding import Encoding
from polarlm.engine.storage import identity, objects, sessions
from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.payloads import Payloads
from tests import tiny
from tests.bare import feed
from tests.tiny import GREEDY, VOCABULARY, assert_idle, forget, held, ids, load_tiny, make_model

N = 8
LENGTH = 61  # sink, six quantized blocks, and five tokens in the current block
NOTE = {"messages": ["é😀", None, 1.5]}
refused = partial(tiny.refused, code="session")


def load(path: Path, cache_type: str = "polarquant", **more) -> Engine:
    return load_tiny(path, **{"device": "cpu", "block_size": N, "calibration": False, **more}, cache_type=cache_type)


def talk(engine: Engine, length: int = LENGTH, seed: int = 1) -> list[int]:
    """A prompt and an answer, whose last token is never fed; the ids that are in the store then, `length` of them."""
    prompt = ids(seed, max(1, length - 20))
    answer = engine.generate(
        prompt, SamplingParams(temperature=0, max_tokens=length - len(prompt) + 1, ignore_eos=True)
    )
    return [*prompt, *answer.token_ids][:length]


def next_logits(engine: Engine, past: list[int]) -> list[np.ndarray]:
    """The logits of a second turn and of the steps after it, which read the stored K/V of `past`."""
    kv = engine._prefixes.match_prefix(past)
    assert kv.length == len(past)
    logits = [feed(engine._model, kv, turn) for turn in (ids(2, 11), *([i] for i in ids(3, 9)))]
    engine._store.release(kv)
    return logits


def objects_of(path: Path) -> tuple[dict[str, Any], dict[int, Object]]:
    """The header of a session's first object, and its blocks by their numbers."""
    with path.open("rb") as file:
        header = dict(objects.read(file, sessions.NAME).header)
        name, number, blocks = sessions._names(header), header["first"], {}
        while file.tell() < path.stat().st_size:
            blocks[number] = objects.read(file, name(number))
            number += 1
    return header, blocks


def write_objects(path: Path, header: dict[str, Any], blocks: dict[int, Object]) -> None:
    """A file with right checksums and names, as far as the header has what they are made of."""
    try:
        name = sessions._names(header)
    except KeyError:
        name = sessions._names({**dict.fromkeys(identity.DETERMINE), "ids": []})
    parts = [Object(header).pack(sessions.NAME), *(block.pack(name(number)) for number, block in blocks.items())]
    path.write_bytes(b"".join(piece for part in parts for piece in part))


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[Engine]:
    with load(tiny_path) as engine:
        yield engine
        assert_idle(engine)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "talk.session"


@pytest.fixture(scope="module")
def saved(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of the tiny model over polarquant. Not to be written to."""
    file = tmp_path_factory.mktemp("saved") / "talk.session"
    with load(tiny_path) as engine:
        talk(engine)
        engine.save_session(file, note=NOTE)
    return file


# -- going on --------------------------------------------------------------------------------------------------------

CASES = {  # settings, and the length of a session: with a sink, whole blocks or a part of one
    "f16": ({"cache_type": "f16"}, 3),
    "default, fitted": ({"cache_type": "balanced", "calibration": True}, N),
    "polarquant": ({"cache_type": "polarquant", "encoding": Encoding(small_means=False)}, LENGTH - 5),
    "mixed": ({"cache_type": "f16", "cache_type_k": "ring4@0,turbo3", "cache_type_v": "f16@0,polarquant"}, LENGTH),
    "not conditioned": ({"cache_type": "ring3.5", "key_conditioning": False}, LENGTH),
}


@pytest.mark.parametrize("case", CASES)
def test_saving_and_loading_does_not_change_logits(tiny_path: Path, file: Path, case: str) -> None:
    settings, length = CASES[case]
    with load(tiny_path, **settings) as engine:
        past = talk(engine, length)
        assert engine.save_session(file) == length
        going_on = next_logits(engine, past)
    with load(tiny_path, **settings) as other:
        talk(other, 30, seed=9)  # so that blocks lie elsewhere
        assert other.load_session(file).token_ids == tuple(past)
        for restored, wanted in zip(next_logits(other, past), going_on, strict=True):
            assert np.array_equal(restored, wanted)
        assert_idle(other)


@pytest.mark.parametrize("fixture", ["mistral_window_sharded", "qwen2_mixed_windows"])
def test_sequences_with_blocks_outside_their_windows(tmp_path: Path, file: Path, fixture: str) -> None:
    path = make_model(tmp_path, fixture)
    with load(path) as engine, load(path) as other:
        past = talk(engine, 100)
        assert engine.save_session(file) == len(past)
        header, blocks = objects_of(file)
        assert header["first"] > 0 or len({block.header["groups"] for block in blocks.values()}) > 1
        other.load_session(file)
        for restored, wanted in zip(next_logits(other, past), next_logits(engine, past), strict=True):
            assert np.array_equal(restored, wanted)
        assert_idle(other)


def test_a_session_belongs_to_the_salt_that_it_was_saved_with(tiny_path: Path, file: Path) -> None:
    """Its tokens are found by no prompt that could not find them before; the file does not have the salt itself."""
    prompt = ids(1, LENGTH)
    with load(tiny_path) as engine:
        engine.generate(prompt, GREEDY, PromptOptions(cache_salt="customer 17"))
        engine.save_session(file)
    assert b"customer 17" not in file.read_bytes()
    with load(tiny_path) as engine:
        for salt in ("", "customer 18"):
            refused(lambda salt=salt: engine.load_session(file, cache_salt=salt), "saved with a cache_salt")
            assert engine.generate(prompt, GREEDY, PromptOptions(cache_salt=salt)).usage.cached_tokens == 0
        engine.load_session(file, cache_salt="customer 17")
        answer = engine.generate([*prompt, 7], GREEDY, PromptOptions(cache_salt="customer 17"))
        assert answer.usage.cached_tokens == LENGTH // N * N
        assert engine.generate(prompt[:30], GREEDY, PromptOptions(cache_salt="other")).usage.cached_tokens == 0


def test_a_session_without_a_salt_takes_none(engine: Engine, saved: Path, file: Path) -> None:
    assert "salt" not in objects_of(saved)[0]
    refused(lambda: engine.load_session(saved, cache_salt="mine"), "without a cache_salt")
    session = engine.load_session(saved)
    assert session.note == NOTE
    assert engine.cache_stats().tokens == len(session.token_ids) == LENGTH
    engine.save_session(file, note=NOTE)  # a loaded session can be saved again
    assert file.read_bytes() == saved.read_bytes()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert engine.generate([*session.token_ids, *ids(2, 4)], GREEDY).usage.cached_tokens == LENGTH


def test_equal_salts_do_not_show(tiny_path: Path, tmp_path: Path) -> None:
    hashes = set()
    with load(tiny_path) as engine:
        for seed in range(2):
            engine.generate(ids(seed, 20), GREEDY, PromptOptions(cache_salt="x"))
            engine.save_session(tmp_path / "x")
            hashes.add(objects_of(tmp_path / "x")[0]["salt"])
    assert len(hashes) == 2


@pytest.mark.parametrize("length", [3, 20, LENGTH])
def test_the_longest_stored_prefix_is_saved(engine: Engine, file: Path, length: int) -> None:
    """A quantized block is saved as a whole or not at all."""
    past = talk(engine)
    talk(engine, 30, seed=5)
    count = engine.save_session(file, prompt=[*past[:length], 7, 7])
    assert count == (length // N * N if N < length < LENGTH else length)
    assert engine.load_session(file).token_ids == tuple(past[:count])


def test_saving_and_loading_does_not_change_running_requests(engine: Engine, saved: Path, file: Path) -> None:
    alone = engine.generate(ids(7, 40), GREEDY).token_ids
    forget(engine)
    chunks = engine.stream(ids(7, 40), GREEDY)
    parts = [next(chunks).token_ids for _ in range(3)]
    past = engine.load_session(saved).token_ids
    assert engine.save_session(file, prompt=past) == LENGTH
    parts += [chunk.token_ids for chunk in chunks]
    assert tuple(i for part in parts for i in part) == alone


# -- the file --------------------------------------------------------------------------------------------------------


def test_a_session_replaces_the_file_before_it(engine: Engine, file: Path) -> None:
    talk(engine, 30)
    engine.save_session(file)
    past = talk(engine, LENGTH, seed=4)
    engine.save_session(file)
    assert engine.load_session(file).token_ids == tuple(past)
    assert os.listdir(file.parent) == [file.name]


def test_a_file_that_is_no_session_is_not_replaced(engine: Engine, tmp_path: Path, tiny_path: Path) -> None:
    talk(engine)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes((tiny_path / "model.safetensors").read_bytes())
    (tmp_path / "letter.txt").write_text("Dear Ada,")
    (tmp_path / "link").symlink_to(tmp_path / "letter.txt")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for path in before:
        refused(lambda path=path: engine.save_session(path), str(path), "is not a session", code="storage")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "empty").touch()
    engine.save_session(tmp_path / "empty")
    assert engine.load_session(tmp_path / "empty").token_ids


def test_an_interrupted_save_leaves_the_old_file(engine: Engine, file: Path) -> None:
    talk(engine)
    engine.save_session(file)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    content, before = file.read_bytes(), held(engine)
    with pytest.raises(KeyboardInterrupt):
        engine.save_session(file, progress=interrupt)
    assert (file.read_bytes(), os.listdir(file.parent)) == (content, [file.name])
    with pytest.raises(KeyboardInterrupt):
        engine.load_session(file, progress=interrupt)
    assert held(engine) == before


# -- refusals: of places ---------------------------------------------------------------------------------------------


def test_a_path_that_cannot_be_a_file_is_refused(engine: Engine, tmp_path: Path, saved: Path) -> None:
    talk(engine)
    os.mkfifo(tmp_path / "pipe")
    places = {
        tmp_path / "none" / "talk": "No such file",
        tmp_path: "folder",
        Path("/dev/null"): "not a regular file",
        tmp_path / "pipe": "not a regular file",
        saved / "talk": "Not a directory",
        tmp_path / ("x" * 300): "too long",
    }
    for place, word in places.items():
        refused(lambda place=place: engine.save_session(place), str(place), word, code="storage")
        refused(lambda place=place: engine.load_session(place), str(place), word, code="storage")
    for move in (engine.save_session, engine.load_session):
        refused(lambda move=move: move("a\0b"), "null", code="storage")
    refused(lambda: engine.load_session(tmp_path / "talk"), "No such file", code="storage")
    assert os.listdir(tmp_path) == ["pipe"]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@contextmanager
def without_rights() -> Iterator[None]:
    """Root may do everything, so be another user for the body of the `with`."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_missing_permission_is_an_error(engine: Engine, saved: Path, tmp_path: Path) -> None:
    talk(engine)
    mine = tmp_path / "mine"
    mine.write_bytes(saved.read_bytes())
    mine.chmod(0)
    tmp_path.chmod(0o555)
    try:
        with without_rights():
            refused(lambda: engine.load_session(mine), str(mine), "Permission denied", code="storage")
            refused(lambda: engine.save_session(tmp_path / "new"), "Permission denied", code="storage")
    finally:
        tmp_path.chmod(0o755)


# -- refusals: of files ----------------------------------------------------------------------------------------------


def assert_refused(engine: Engine, file: Path, *words: str) -> None:
    """Assert that loading `file` is refused and leaves the engine as it was."""
    before = held(engine)
    refused(lambda: engine.load_session(file), str(file), *words)
    assert held(engine) == before


def test_other_files_are_refused(engine: Engine, tiny_path: Path, file: Path) -> None:
    file.write_text("no session at all\n" * 100)
    assert_refused(engine, file, "not a session")
    assert_refused(engine, next(tiny_path.glob("*.safetensors")), "not a session")


OTHERS = {
    "cache type": ({"cache_type": "ring4"}, ["polarquant/polarquant", "ring4/ring4", "cache_type_k"]),
    "one layer": ({"cache_type_k": "ring3@1,polarquant"}, ["ring3/polarquant"]),
    "block size": ({"block_size": 16}, ["blocks of 8", "16"]),
    "calibration": ({"calibration": True}, ["encoded in another way", "calibration=False on both"]),
    "context": ({"ctx_size": LENGTH - 1}, [f"{LENGTH} tokens", f"context has {LENGTH - 1}", "ctx_size"]),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_session_of_other_settings_is_refused(tiny_path: Path, saved: Path, other: str) -> None:
    settings, words = OTHERS[other]
    with load(tiny_path, **settings) as engine:
        assert_refused(engine, saved, *words)


def test_a_session_of_another_model_is_refused(tmp_path: Path, saved: Path) -> None:
    with load(make_model(tmp_path, "llama_mha")) as engine:
        assert_refused(engine, saved, "another", str(engine.model.name))


Change = Callable[[dict[str, Any], dict[int, Object]], object]


def with_header(**changes: Any) -> Change:
    return lambda header, blocks: header.update(changes)


def with_block(number: int, payload: slice = slice(None), **changes: Any) -> Change:
    """Changes of a block's header, and a part of its payload."""

    def change(header: dict[str, Any], blocks: dict[int, Object]) -> None:
        block = blocks[number]
        blocks[number] = Object({**block.header, **changes}, block.payload[payload])

    return change


ANSWER = ["ab" * 32, [5]]
CHECKSUMMED: dict[str, tuple[Change, str]] = {  # files with right checksums and wrong contents
    "version": (with_header(version="999"), "another version"),
    "model": (with_header(model="0" * 64, name="Other"), "Other"),
    "no version": (lambda header, blocks: header.pop("version"), "damaged"),
    "an id": (with_header(ids=5), "damaged"),
    "fewer ids": (with_header(ids=[7] * (LENGTH - N)), "damaged"),
    "other ids": (with_header(ids=[7] * LENGTH), "other tokens"),
    "ids of no tokens": (with_header(ids=[VOCABULARY] * LENGTH), "damaged"),
    "salt": (with_header(salt=5), "cache_salt"),
    "no first block": (lambda header, blocks: header.pop("first"), "damaged"),
    "far": (with_header(first=10**12), "damaged"),
    "a text for a number": (with_header(first="0"), "damaged"),
    "answers": (with_header(answers={"a": 1}), "damaged"),
    "digest": (with_header(answers=[["ab", [5]]]), "damaged"),
    "text for ids": (with_header(answers=[[ANSWER[0], "5"]]), "damaged"),
    "a third part": (with_header(answers=[[*ANSWER, 6]]), "damaged"),
    "records": (with_block(2, stored_as="records 999"), "records 999"),
    "codes": (with_block(2, slice(0, -64)), "block 2: it has another size"),
    "a block as the first one": (lambda header, blocks: blocks.update({0: blocks[1]}), "block 0: it is another object"),
    "a block less": (lambda header, blocks: blocks.pop(LENGTH // N), "block 7"),
    "a block more": (lambda header, blocks: blocks.update({8: blocks[7]}), "more follows"),
    "another block": (lambda header, blocks: [blocks.update({9: blocks.pop(7)})], "block 7"),
}


def test_a_file_with_a_right_checksum_and_wrong_contents_is_refused(engine: Engine, saved: Path, file: Path) -> None:
    for change, word in CHECKSUMMED.values():
        header, blocks = objects_of(saved)
        change(header, blocks)
        write_objects(file, header, blocks)
        assert_refused(engine, file, word)


def test_numbers_are_checked_without_the_engines_lock(engine: Engine, saved: Path, monkeypatch) -> None:
    """It concerns the file only."""
    look, taken = Payloads.check_block, []

    def watched(*arguments):
        taken.append(engine._lock.taken)
        look(*arguments)

    monkeypatch.setattr(Payloads, "check_block", watched)
    engine.load_session(saved)
    assert taken == [False] * (LENGTH // N - 1)


# -- refusals: of requests -------------------------------------------------------------------------------------------


def test_saving_nothing_is_an_error(engine: Engine, file: Path) -> None:
    refused(lambda: engine.save_session(file), "nothing to save")
    talk(engine)
    refused(lambda: engine.save_session(file, prompt=ids(77, 20)), "nothing to save")
    forget(engine)
    refused(lambda: engine.save_session(file), "nothing to save")
    assert not file.exists()


def test_a_note_must_be_json(engine: Engine, file: Path) -> None:
    talk(engine)
    for note in (object(), {1, 2}, b"x"):
        refused(lambda note=note: engine.save_session(file, note=note), "JSON")
    assert os.listdir(file.parent) == []


def test_loading_overwrites_kept_blocks(tiny_path: Path, saved: Path) -> None:
    with load(tiny_path, ctx_size=80) as engine:
        talk(engine, 60, seed=5)
        past = engine.load_session(saved).token_ids
        assert len(past) == LENGTH
        assert engine.generate([*past, 7], GREEDY).usage.cached_tokens == LENGTH
        assert_idle(engine)


def test_loading_does_not_preempt_running_requests(tiny_path: Path, saved: Path) -> None:
    with load(tiny_path, ctx_size=80) as engine:
        chunks = engine.stream(ids(5, 50), GREEDY)
        next(chunks)
        before = held(engine)
        refused(lambda: engine.load_session(saved), "no room", "later", code="out_of_memory")
        assert held(engine) == before
        chunks.close()
        assert len(engine.load_session(saved).token_ids) == LENGTH
        assert_idle(engine)


def test_an_engine_without_kept_sequences_loads_no_session(tiny_path: Path, saved: Path) -> None:
    with load(tiny_path, kept_sequences=0) as engine:
        refused(lambda: engine.load_session(saved), "kept_sequences")
