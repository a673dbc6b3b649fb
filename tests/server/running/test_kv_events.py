"""Messages for routers: a subscriber with vLLM's schema learns exactly which blocks can be found."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.engine.cli.flags import FlagError
from polarlm.server.config import read_command_line
from polarlm.server.running.kv_events import KVEvents
from polarlm.server.running.listening import ListenError
from tests.ports import free_port
from tests.server.process import SMALL_BLOCKS, Process
from tests.state.test_prefix import findable
from tests.tiny import PLAIN, forget, load_tiny

SETTINGS = {**PLAIN, "block_size": 8}
SECONDS = 60_000  # that a test waits for a message, in milliseconds


# vLLM's schema of versions 0.26 to 0.33, as far as it has no defaults, written down here again: a list for the batch,
# a map with a type for each event.


class Event(msgspec.Struct, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """A router's view of one server."""

    def __init__(self, address: str, topic: str = "") -> None:
        self.blocks: dict[int, dict[Any, tuple[Any, list[int]]]] = {}  # by group: hash → (hash before, tokens)
        self.next = 0  # the number of the next message; 0: any
        self.cleared = 0
        self.tokens: set[int] = set()  # of all messages
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.linger = 0
        self.socket.rcvtimeo = SECONDS
        self.socket.subscribe(topic)
        self.socket.connect(address)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def take(self, number: bytes, payload: bytes) -> None:
        found = int.from_bytes(number, "big")
        assert self.next in (0, found)
        self.next = found + 1
        batch = msgspec.msgpack.decode(payload, type=Batch)
        assert batch.ts > 1e9
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            self._apply(event)

    def _apply(self, event: Event) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
            self.cleared += 1
            return
        assert isinstance(event, BlockStored | BlockRemoved)
        assert event.group_idx is not None
        group = self.blocks.setdefault(event.group_idx, {})
        if isinstance(event, BlockRemoved):
            for removed in event.block_hashes:
                del group[removed]
            return
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        self.tokens.update(event.token_ids)
        before = event.parent_block_hash
        for number, stored in enumerate(event.block_hashes):
            assert stored not in group
            start = number * event.block_size
            group[stored] = before, event.token_ids[start : start + event.block_size]
            before = stored

    def receive(self) -> list[bytes]:
        """The next message, taken."""
        message = self.socket.recv_multipart()
        self.take(*message[1:])
        return message

    def known(self) -> set[tuple[int, Any]]:
        return {(group, key) for group, blocks in self.blocks.items() for key in blocks}

    def prompts(self) -> list[list[int]]:
        """The tokens up to the end of each block of group 0 that all blocks before it are there for."""
        found = []
        for key in self.blocks.get(0, {}):
            ids: list[int] = []
            at: Any = key
            while at is not None and at in self.blocks[0]:
                at, own = self.blocks[0][at]
                ids = own + ids
            if at is None:
                found.append(ids)
        return found


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def published(tiny_path: Path) -> Iterator[tuple[Engine, Subscriber]]:
    """An engine with room for few blocks, and a subscriber that is connected before the first message."""
    address = free_address()
    with ExitStack() as ends, load_tiny(tiny_path, **SETTINGS, ctx_size=96) as engine:
        events = ends.enter_context(closing(KVEvents(address, "kv@here@tiny")))
        subscriber = ends.enter_context(Subscriber(address, "kv@"))
        _joined(events, subscriber)
        events.watch(engine)
        yield engine, subscriber


def _joined(events: KVEvents, subscriber: Subscriber) -> None:
    """Wait until the subscriber gets what is published: before it has joined, messages pass it by."""
    sent = 0
    while not subscriber.socket.poll(10):
        events._publisher.send_multipart((b"kv@", b"", b"%d" % sent))
        sent += 1
        assert sent < SECONDS // 10
    while subscriber.socket.recv_multipart()[2] != b"%d" % (sent - 1):
        pass


def catch_up(engine: Engine, subscriber: Subscriber) -> set[tuple[int, Any]]:
    """What the engine can find, when the subscriber knows as much."""
    expected = {(group, int.from_bytes(key[:8], "big")) for group, key in findable(engine._prefixes)}
    while subscriber.known() != expected:
        subscriber.receive()
    return expected


def test_a_subscriber_knows_the_blocks_that_can_be_found(published: tuple[Engine, Subscriber]) -> None:
    engine, subscriber = published
    rng, seen = random.Random(7), set()
    stems = [[rng.randrange(5, 90) for _ in range(40)] for _ in range(3)]
    for turn in range(24):
        stem = rng.choice(stems)[: rng.randrange(8, 41)]
        prompt = stem + [rng.randrange(5, 90) for _ in range(rng.randrange(1, 30))]
        engine.generate(prompt, SamplingParams(max_tokens=rng.randrange(1, 20), temperature=0))
        if turn == 15:
            forget(engine)
            assert catch_up(engine, subscriber) == set()
        seen |= catch_up(engine, subscriber)
        for ids in subscriber.prompts():
            if ids not in subscriber.prompts():  # the copy of a current block, below, has replaced it
                continue
            kv = engine._prefixes.match_prefix([*ids, 4])
            assert kv.length >= len(ids)
            engine._prefixes.release(kv, ids)
            catch_up(engine, subscriber)
    assert len(seen) > 2 * len(subscriber.known()) > 0  # many were removed
    assert subscriber.cleared == 1


def test_fields_are_vllms(published: tuple[Engine, Subscriber]) -> None:
    engine, subscriber = published
    ids = list(range(10, 37))
    engine.generate(ids, SamplingParams(max_tokens=1))
    topic, number, cleared = subscriber.receive()
    assert (topic, len(number)) == (b"kv@here@tiny", 8)
    assert msgspec.msgpack.decode(cleared)[1:] == [[{"type": "AllBlocksCleared"}], 0]
    events: list[dict[str, Any]] = []
    while len(subscriber.known()) < 3:
        topic, number, payload = subscriber.receive()
        assert (topic, number) == (b"kv@here@tiny", (subscriber.next - 1).to_bytes(8, "big"))
        more, rank = msgspec.msgpack.decode(payload)[1:]
        events += more
        assert rank == 0
    hashes = [key for event in events for key in event.pop("block_hashes")]
    assert [type(key) for key in hashes] == [int] * 3
    assert [token for event in events for token in event.pop("token_ids")] == ids[:24]
    assert events[0].pop("parent_block_hash") is None
    assert events[0] == {
        "type": "BlockStored",
        "block_size": 8,
        "lora_id": None,
        "medium": None,
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": None,
    }


def test_servers_alike_give_a_block_the_same_hash(published: tuple[Engine, Subscriber], tiny_path: Path) -> None:
    engine, subscriber = published
    with (
        load_tiny(tiny_path, **SETTINGS, ctx_size=96) as other,
        load_tiny(tiny_path, **{**SETTINGS, "cache_type": "f16"}) as f16,
    ):
        for one in (engine, other, f16):
            one.generate(list(range(10, 37)), SamplingParams(max_tokens=1))
        known = catch_up(engine, subscriber)
        same, different = (
            {(0, int.from_bytes(key[:8], "big")) for _, key in findable(one._prefixes)} for one in (other, f16)
        )
    assert known == same
    assert not known & different


def test_prompts_with_a_salt_are_not_published(published: tuple[Engine, Subscriber]) -> None:
    engine, subscriber = published
    secret, plain = list(range(10, 40)), list(range(40, 60))
    engine.generate(secret, SamplingParams(max_tokens=1), PromptOptions(cache_salt="mine"))
    forget(engine)
    engine.generate(plain, SamplingParams(max_tokens=1))
    catch_up(engine, subscriber)
    assert subscriber.prompts() == [plain[:8], plain[:16]]
    assert not subscriber.tokens & set(secret)


def test_messages_of_a_server_that_was_started_again_have_higher_numbers(tiny_path: Path) -> None:
    """A subscriber drops what has a lower number than the message before."""
    address, last = free_address(), -1
    with Subscriber(address) as subscriber:
        for _ in range(2):
            with load_tiny(tiny_path, **SETTINGS) as engine, closing(KVEvents(address)) as events:
                _joined(events, subscriber)
                events.watch(engine)
                subscriber.next = 0
                assert int.from_bytes(subscriber.receive()[1], "big") > last
                engine.generate(list(range(10, 30)), SamplingParams(max_tokens=1))
                catch_up(engine, subscriber)
            last = int.from_bytes(subscriber.receive()[1], "big")  # of the message that all blocks are gone
            assert not subscriber.known()


@pytest.mark.slow
def test_a_server_publishes_until_its_end(tiny_path: Path, tmp_path: Path) -> None:
    address = free_address()
    blocks = SMALL_BLOCKS.format(kept=8)
    with (
        Subscriber(address) as subscriber,
        Process(tiny_path, tmp_path, "--kv-events", address, prelude=blocks) as server,
    ):
        body = {"prompt": list(range(10, 60)), "max_tokens": 1}
        for seed in itertools.count():
            if seed >= 3 and subscriber.socket.poll(10):  # it may join late
                break
            body["prompt"] = [seed % 80 + 5, *range(10, 60)]
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=180).raise_for_status()
        subscriber.next = int.from_bytes(subscriber.socket.recv_multipart()[1], "big") + 1
        server.process.terminate()
        while subscriber.cleared == 0:
            subscriber.receive()
        assert server.process.wait(60) == 0
    assert subscriber.known() == set()


def test_an_address_in_use_is_an_error_for_the_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenError, match=f"^--kv-events {address}: cannot publish there: "):
            KVEvents(address)


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-events", "127.0.0.1:5557"],
        ["--kv-events", "tcp://127.0.0.1"],
        ["--kv-events", "udp://127.0.0.1:5557"],
        ["--kv-events-topic", "kv@"],
    ],
)
def test_flags_that_make_no_sense_are_refused(words: list[str]) -> None:
    with pytest.raises(FlagError, match="--kv-events"):
        read_command_line(words, {})
