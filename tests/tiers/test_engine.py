"""Engines with tiers: what one has computed, the next one finds; nothing wrong is used, no trouble ends a request."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Completion, Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.transfer import FIELDS
from polarlm.engine.storage.tiers import tiers, writing
from polarlm.engine.storage.tiers.search import Search
from polarlm.engine.storage.tiers.tier_store import FolderTier, MemoryTier
from tests.server.lines import PATIENCE
from tests.storage.arrays import assert_same, stored
from tests.tiny import assert_idle, blocks_left, forget, ids, load_tiny, make_model

N = 8
FIXTURES = ["llama_gqa_linear", "qwen2_mixed_windows"]
PARAMS = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True, logprobs=3)


PROMPT = ids(1, 45)
HIT = 40  # tokens: the last five share a block with the answer, which is quantized at the end


def load(model: Path, folder: Path | None, **more) -> Engine:
    disk = {} if folder is None else {"cache_disk": "10M", "cache_disk_folder": str(folder)}
    settings = {"device": "cpu", "block_size": N, "calibration": False, "cache_type": "ring4", **disk, **more}
    return load_tiny(model, **settings)


@pytest.fixture(scope="module", params=FIXTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("plain"))


def next_turn(engine: Engine, first: Completion) -> Completion:
    return engine.generate([*PROMPT, *first.token_ids, *ids(2, 9)], PARAMS)


def kv_of(engine: Engine, tokens: Sequence[int]) -> dict[tuple[int, int, str], np.ndarray]:
    with engine._exclusive():
        kv = engine._prefixes.match_prefix(tokens)
        arrays = stored(engine._store, kv)
        engine._prefixes.release(kv, tokens)
    return arrays


@pytest.mark.parametrize("compiled", [True, False])
def test_a_turn_after_a_restart_equals_one_without_it_bit_for_bit(model: Path, tmp_path: Path, compiled: bool) -> None:
    """Log-probabilities, codes and full-precision blocks."""
    more = {} if compiled else {"ops": NumpyOps()}
    with load(model, None, **more) as engine:
        first = engine.generate(PROMPT, PARAMS)
        expected = next_turn(engine, first)
        past = [*PROMPT, *first.token_ids, *ids(2, 9), *expected.token_ids[:-1]]
        kept = kv_of(engine, past)
    with load(model, tmp_path, **more) as engine:
        assert engine.generate(PROMPT, PARAMS).token_ids == first.token_ids
    with load(model, tmp_path, **more) as engine:
        answer = next_turn(engine, first)
        assert answer.logprobs == expected.logprobs
        assert answer.usage.cached_tokens == expected.usage.cached_tokens == len(PROMPT) + 12
        assert answer.usage.cached_from == {"disk": len(PROMPT) + 12}
        assert expected.usage.cached_from == {"store": len(PROMPT) + 12}
        assert_same(kv_of(engine, past), kept)
        assert_idle(engine)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_backends_share_a_folder(plain_model: Path, tmp_path: Path, compiled_first: bool) -> None:
    """Blocks of 16 tokens, which lie in tiles with compiled kernels, and in fields without: the codes are the same."""
    seen = []
    for compiled in (compiled_first, not compiled_first):
        with load(plain_model, tmp_path, block_size=16, **({} if compiled else {"ops": NumpyOps()})) as engine:
            seen.append(engine.generate(PROMPT, PARAMS).usage.cached_tokens)
            kv = engine._prefixes.match_prefix(PROMPT)
            assert ("k.tiles" in {name for *_, name in stored(engine._store, kv)}) == compiled
            seen.append(stored(engine._store, kv, FIELDS))
            engine._store.release(kv)
    assert [seen[0], seen[2]] == [0, 32]
    first, second = ({key: x for key, x in arrays.items() if 0 < key[0] < 2} for arrays in seen[1::2])
    assert first
    assert_same(first, second)


def test_a_conversation_in_text_goes_on_after_a_restart(plain_model: Path, tmp_path: Path) -> None:
    """Ids of answers are kept as well: another tokenization of their text would miss the cache."""
    messages = [{"role": "user", "content": "hello there, how are you"}]
    with load(plain_model, tmp_path) as engine:
        first = engine.chat(
            messages, SamplingParams(seed=3, max_tokens=40, logit_bias=dict.fromkeys(range(5), -np.inf))
        )
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and then"}]
    with load(plain_model, tmp_path) as engine:
        second = engine.chat(messages, PARAMS)
    assert second.usage.cached_tokens == first.usage.prompt_tokens + len(first.token_ids) - 1


@pytest.mark.parametrize("room", [True, False])
def test_blocks_that_are_reused_before_they_are_written_are_copied(
    plain_model: Path, tmp_path: Path, may_write: threading.Event, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    if not room:
        monkeypatch.setattr(writing, "_COPIED_BYTES", 0)
    with load(plain_model, None) as engine:
        first = engine.generate(PROMPT, PARAMS)
        expected = next_turn(engine, first)
    with load(plain_model, tmp_path) as engine:
        engine.generate(PROMPT, PARAMS)
        forget(engine)
        may_write.set()
        assert engine._tiers._writer.flush(PATIENCE)
        answer = next_turn(engine, first)
        assert answer.usage.cached_from == ({"disk": len(PROMPT) + 12} if room else {})
        assert (answer.logprobs == expected.logprobs) == room  # prompts are computed with full-precision K/V
        blocks = engine._tiers._writer._blocks
        assert engine._tiers._writer.flush(PATIENCE)
        assert (blocks._waiting, blocks._copies, blocks._bytes) == (set(), {}, 0)


def test_requests_without_the_cache_read_no_tier(plain_model: Path, tmp_path: Path) -> None:
    with load(plain_model, tmp_path) as engine:
        engine.generate(PROMPT, PARAMS)
    with load(plain_model, tmp_path) as engine:
        assert engine.generate(PROMPT, PARAMS, PromptOptions(cache_prompt=False)).usage.cached_tokens == 0
        assert engine.embed(PROMPT).usage.cached_tokens == 0


def test_weights_that_differ_in_one_number_share_nothing(plain_model: Path, tmp_path: Path) -> None:
    """In the middle of a matrix, where no sample of the weights is taken."""
    other = tmp_path / "other"
    shutil.copytree(plain_model, other)
    (weights,) = other.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-len(content) // 3] ^= 1
    weights.write_bytes(content)
    with load(plain_model, tmp_path / "blocks") as engine:
        engine.generate(PROMPT, PARAMS)
        hashes = engine._prefixes.hashes(PROMPT)
    with load(other, tmp_path / "blocks") as engine:
        assert engine._prefixes.hashes(PROMPT) == hashes  # the samples are equal
        assert engine.generate(PROMPT, PARAMS).usage.cached_tokens == 0
    with load(plain_model, tmp_path / "blocks") as engine:
        assert engine.generate(PROMPT, PARAMS).usage.cached_tokens == HIT


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(plain_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Completion, Completion]:
    """A folder of blocks, the answer that they are of, and the next turn without tiers."""
    folder = tmp_path_factory.mktemp("blocks")
    with load(plain_model, folder) as engine:
        first = engine.generate(PROMPT, PARAMS)
    with load(plain_model, None) as engine:
        engine.generate(PROMPT, PARAMS)
        return folder, first, next_turn(engine, first)


def test_a_damaged_file_is_removed_and_told_with_its_name(
    plain_model: Path, written, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "blocks"
    shutil.copytree(written[0], folder)
    first = max(folder.iterdir(), key=lambda file: file.stat().st_size)  # in full precision
    with load(plain_model, folder) as engine:
        for _ in range(3):
            assert engine._tiers._writer.flush(PATIENCE)  # what the answer before has left to write
            forget(engine)
            first.write_bytes(b"?" * 100)
            answer = engine.generate(PROMPT, PARAMS)
            assert answer.usage.cached_tokens == 0
            assert answer.logprobs == written[1].logprobs
    told = [record.message for record in caplog.records if "damaged" in record.message]
    assert [first.name in line for line in told] == [True] * 3
    assert "(3 of them so far)" in told[2]
    with load(plain_model, folder) as engine:  # what was written in its place is right
        assert engine.generate(PROMPT, PARAMS).usage.cached_tokens == HIT


# -- trouble -----------------------------------------------------------------------------------------------------------


def test_a_disk_that_hangs_delays_one_request_and_no_other(
    plain_model: Path, written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    shutil.copytree(written[0], tmp_path / "blocks")
    hangs, asked = threading.Event(), []

    def read(place: FolderTier, name: bytes) -> None:
        asked.append(name)
        hangs.wait(PATIENCE)

    with load(plain_model, tmp_path / "blocks") as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._tiers._patience, "seconds", lambda tokens: 0.05)
            patch.setattr(FolderTier, "read", read)
            while not asked:  # its thread may begin too late
                assert engine.generate(PROMPT, PARAMS).token_ids == written[1].token_ids
                forget(engine)
            late = engine._tiers._late_thread
            for _ in range(2):
                assert engine.generate(PROMPT, PARAMS).token_ids == written[1].token_ids
                forget(engine)
                assert engine._tiers._late_thread is late  # no other one has begun
            hangs.set()
            late.join(PATIENCE)
        assert engine.generate(PROMPT, PARAMS).usage.cached_tokens == HIT  # it is asked again
    assert "computed without them" in caplog.text


def test_a_disk_that_takes_no_writes_delays_only_the_end(
    plain_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(tiers, "_LAST_PATIENCE", 0.05)
    hangs, begun = threading.Event(), threading.Event()

    def write(*_: object) -> None:
        begun.set()
        hangs.wait(PATIENCE)

    monkeypatch.setattr(FolderTier, "write", write)
    engine = load(plain_model, tmp_path)
    engine.generate(PROMPT, PARAMS)
    assert begun.wait(PATIENCE)
    for seed in range(5):
        engine.generate(ids(seed, 30), PARAMS)
    engine.close()
    hangs.set()
    thread = engine._tiers._writer._thread
    thread.join(PATIENCE)  # it finds the store freed, and ends
    assert not thread.is_alive()
    assert "not all blocks were kept" in caplog.text


def test_a_full_disk_is_told_once_and_written_again_when_it_has_room(
    plain_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    write, full = FolderTier.write, [True]

    def may_fail(place: FolderTier, name: bytes, header: bytes, payload: memoryview) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(place, name, header, payload)

    monkeypatch.setattr(FolderTier, "write", may_fail)
    for is_full in (True, False):
        full[0] = is_full
        with load(plain_model, tmp_path) as engine:
            assert engine.generate(PROMPT, PARAMS).usage.cached_tokens == 0
    assert caplog.text.count("No space left") == 1
    with load(plain_model, tmp_path) as engine:
        assert engine.generate(PROMPT, PARAMS).usage.cached_tokens == HIT


def test_a_store_takes_the_blocks_that_it_has_room_for(plain_model: Path, written, tmp_path: Path) -> None:
    """The others stay in their place."""
    shutil.copytree(written[0], tmp_path / "blocks")
    with load(plain_model, tmp_path / "blocks") as engine:
        with blocks_left(engine, 5):
            answer = next_turn(engine, written[1])
        assert answer.usage.cached_from == {"disk": N}  # the first one, which is not quantized
        assert answer.finish_reason == "length"
        assert_idle(engine)
        forget(engine)
        assert next_turn(engine, written[1]).logprobs == written[2].logprobs


def test_blocks_wait_for_requests_within_a_budget(
    plain_model: Path, written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it a shorter part of the prefix is read, also if its first block comes last; what has been put back, or
    was never used, is free again."""
    read, second_is_read = Search._block, threading.Event()

    def first_last(search: Search, number: int) -> Any:
        block = read(search, number)
        second_is_read.wait(PATIENCE) if number == 0 else second_is_read.set()
        return block

    monkeypatch.setattr(Search, "_block", first_last)
    shutil.copytree(written[0], tmp_path / "blocks")
    with load(plain_model, tmp_path / "blocks") as engine:
        budget = engine._tiers._budget
        whole = budget._size
        request = engine._request(PROMPT, PARAMS, None, {}, outbox=[])
        taken = sum(claim.bytes for claim in budget._claims)
        assert 0 < taken < whole
        del request
        assert not budget._claims
        budget._size = taken - 1
        cached = engine.generate(PROMPT, PARAMS).usage.cached_tokens
        assert 0 < cached < HIT
        assert not sum(claim.bytes for claim in budget._claims)


# -- settings ----------------------------------------------------------------------------------------------------------


SETTINGS = [
    ({"cache_disk": "much"}, "cache_disk=much: this is not a size"),
    ({"cache_disk_folder": "x"}, "cache_disk_folder=x: say how large"),
    ({"cache_disk": "100"}, "cache_disk=100: a block of this model takes "),
    ({"cache_remote": "http://host"}, "--kv-store shares conversations"),
    (
        {"kv_store": "ftp://host/x"},
        "kv_store=ftp://host/x: ftp:// is not one of s3, gs, az, ",
    ),
    ({"kv_store": "https://host/x"}, "a server of WebDAV is webdavs://"),
    ({"kv_store": os.devnull + "/folder"}, "kv_store=/dev/null/folder: Not a directory; give a folder, or a URL"),
    ({"cache_disk": "1G", "kept_sequences": 0}, "kept_sequences=0 turns that off"),
    ({"cache_ram": "1G"}, "the model runs on the CPU"),
    ({"cache_disk": "1G", "cache_disk_folder": os.devnull + "/folder"}, "Blocks cannot be kept in"),
]


def test_settings_that_cannot_be_are_a_sentence(plain_model: Path) -> None:
    for changes, words in SETTINGS:
        with pytest.raises(EngineError) as raised:
            load(plain_model, None, **changes)
        assert words in str(raised.value)
        assert "\n" not in str(raised.value)


def check_child_answers(engine: Engine, prepare: Callable[[], object] = lambda: None) -> None:
    """A forked child answers with its copy of the engine, after it has run `prepare`."""
    child = os.fork()
    if child == 0:
        prepare()
        signal.alarm(int(PATIENCE))
        try:
            os._exit(0 if len(engine.generate(PROMPT, PARAMS).token_ids) == 13 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_does_not_wait_for_the_digest_of_its_parent(
    plain_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = threading.Event()
    monkeypatch.setattr(tiers, "stored_digest", lambda *_: None)
    monkeypatch.setattr(tiers, "digest", lambda *_: bytes(hashed.wait(PATIENCE)))
    with load(plain_model, tmp_path) as engine:
        check_child_answers(engine, lambda: monkeypatch.setattr(tiers, "_NAMES_SECONDS", 2 * PATIENCE))
        hashed.set()


def test_no_descriptor_and_no_thread_is_left(plain_model: Path, tmp_path: Path) -> None:
    def opened() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), sum("tiers" in thread.name for thread in threading.enumerate())

    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not list open files")

    def turn(seed: int) -> None:
        with load(plain_model, tmp_path) as engine:
            engine.generate(ids(seed, 30), PARAMS)

    turn(0)
    gc.collect()  # what other tests have left
    before = opened()
    for seed in range(4):
        turn(seed)
    assert opened() == before


def memory_of(engine: Engine) -> Callable[[], int]:
    place = engine._tiers._tiers[0].store
    assert isinstance(place, MemoryTier)
    return lambda: place.contents.bytes


def test_host_memory_keeps_what_the_store_has_lost(plain_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: this CPU has only the name of one."""
    monkeypatch.setattr(NumpyOps, "name", "gpu")
    with load(plain_model, None, cache_ram="1M", ops=NumpyOps()) as engine:
        held = memory_of(engine)
        first = engine.generate(PROMPT, PARAMS)
        assert engine._tiers._writer.flush(PATIENCE)
        forget(engine)
        assert next_turn(engine, first).usage.cached_from == {"ram": len(PROMPT) + 12}
        assert 0 < held() <= 1 << 20


def test_requests_that_look_for_blocks_go_before_the_writer(
    plain_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_LONGEST_PAUSE", 60.0)
    with load(plain_model, tmp_path) as engine:
        writer = engine._tiers._writer
        with writer.pause():
            engine.generate(PROMPT, PARAMS)
            assert not writer.flush(0.2)
            assert not [*tmp_path.glob("[0-9a-f]*")]
        assert writer.flush(PATIENCE)
        assert [*tmp_path.glob("[0-9a-f]*")]
