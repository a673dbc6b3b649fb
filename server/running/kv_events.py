"""Tells routers which blocks this server has, in messages over ZeroMQ in the format of vLLM 0.26 and later.

A message has three parts: the topic, its number (8 bytes, big-endian), and a batch in MessagePack:
[seconds since 1970, [events], 0]. An event is a map whose "type" is its name. The first and the last message of a
server are AllBlocksCleared. A subscriber that has missed messages asks the replay socket for those from a number on,
and gets (topic, number, batch) of each that is still kept, then (empty, -1, empty).

Numbers increase by one, starting with the milliseconds since 1970. A subscriber takes a message with a lower number
than the previous one for an old message, so a restarted server must begin with a higher number.

The engine's thread only puts changes into a queue. A block's hash is the first 8 bytes of its key in the prefix cache,
as a number. Blocks with a cache salt are left out: a salt keeps clients apart, and a message contains tokens.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import msgspec
import zmq

from polarlm.engine import Engine
from polarlm.engine.state.block_events import BlockRemoved, BlockStored
from polarlm.server.running.listening import ListenError

_BATCH = 256  # most events of a message
_REPLAY_BYTES = 32 << 20  # of messages that are kept for subscribers that missed them
_WAITING = 100_000  # messages that wait for a slow subscriber, which misses further ones
_LAST_MILLISECONDS = 500  # time for the last messages to be sent
_END = (-1).to_bytes(8, "big", signed=True)


class _Stored(msgspec.Struct, tag="BlockStored"):
    """Consecutive blocks of a sequence; the fields are vLLM's."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None
    group_idx: int


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: Sequence[_Stored | _Removed | _Cleared]
    data_parallel_rank: int = 0


class KVEvents:
    """Publishes changes of an engine's blocks, from `watch` until `close`."""

    def __init__(self, address: str, replay: str | None = None, topic: str = "") -> None:
        """Listens at `address`, and at `replay` for subscribers that missed messages. Raises ListenError."""
        self._topic = topic.encode()
        self._queue: SimpleQueue[BlockStored | BlockRemoved | None] = SimpleQueue()
        self._context = zmq.Context()
        self._sent: deque[tuple[bytes, bytes]] = deque()  # (number, batch)
        self._sent_bytes = 0
        self._next = time.time_ns() // 1_000_000  # on average, far less than one message a millisecond is sent
        self._threads: list[threading.Thread] = []
        try:
            self._publisher = self._bound(zmq.PUB, "--kv-events", address)
            self._replay = None if replay is None else self._bound(zmq.ROUTER, "--kv-events-replay", replay)
        except ListenError:
            self._context.destroy(linger=0)
            raise

    def _bound(self, kind: int, flag: str, address: str) -> zmq.Socket[bytes]:
        bound: zmq.Socket[bytes] = self._context.socket(kind)
        bound.set_hwm(_WAITING)
        bound.linger = _LAST_MILLISECONDS
        try:
            bound.bind(address)
        except zmq.ZMQError as error:
            raise ListenError(f"{flag} {address}: cannot publish there: {error.strerror}") from None
        return bound

    def watch(self, engine: Engine) -> None:
        """Publish the blocks that `engine` stores and removes from now on. It must not have served a request yet."""
        self._windows = [window for window, _ in engine.cache_shape.groups]
        self._block_size = engine.cache_shape.block_size
        self._medium = "GPU" if engine.status().threads is None else None
        self._threads.append(threading.Thread(target=self._publish_all, name="kv-events", daemon=True))
        if self._replay is not None:
            self._threads.append(threading.Thread(target=self._replay_all, name="kv-events-replay", daemon=True))
        for thread in self._threads:
            thread.start()
        engine.watch_blocks(self._queue.put)

    def close(self) -> None:
        """Publish the remaining events and that all blocks are gone, then stop."""
        self._queue.put(None)
        if self._threads:
            self._threads[0].join()
            self._context.term()  # ends the thread that replays
        else:
            self._context.destroy(linger=0)

    # -- publishing --------------------------------------------------------------------------------------------

    def _publish_all(self) -> None:
        with self._publisher:
            self._send([_Cleared()])
            present: set[tuple[int, bytes]] = set()
            while (events := self._next_events()) is not None:
                if messages := self._messages(events, present):
                    self._send(messages)
            self._send([_Cleared()])

    def _next_events(self) -> list[BlockStored | BlockRemoved] | None:
        """The next events, as many as a message may have; waits for the first. None at the end."""
        events = [self._queue.get()]
        while events[-1] is not None and len(events) < _BATCH:
            try:
                events.append(self._queue.get_nowait())
            except Empty:
                break
        if events[-1] is None and len(events) > 1:
            self._queue.put(None)
        return [event for event in events if event is not None] or None

    def _messages(
        self, events: Iterable[BlockStored | BlockRemoved], present: set[tuple[int, bytes]]
    ) -> list[_Stored | _Removed]:
        """The events in vLLM's shape, with those of consecutive blocks joined. present: published blocks; updated."""
        found: list[_Stored | _Removed] = []
        end: bytes | None = None  # the key of the last block, if that was stored
        for event in events:
            last = found[-1] if found and found[-1].group_idx == event.group else None
            block, number = (event.group, event.key), _number(event.key)
            if isinstance(event, BlockStored):
                present.add(block)
                if isinstance(last, _Stored) and end == event.before:
                    last.block_hashes.append(number)
                    last.token_ids.extend(event.ids)
                else:
                    found.append(self._stored(event))
                end = event.key
            elif block in present:  # blocks with a salt are not
                present.remove(block)
                if isinstance(last, _Removed):
                    last.block_hashes.append(number)
                else:
                    found.append(_Removed([number], self._medium, event.group))
        return found

    def _stored(self, event: BlockStored) -> _Stored:
        window = self._windows[event.group]
        return _Stored(
            block_hashes=[_number(event.key)],
            parent_block_hash=None if event.before is None else _number(event.before),
            token_ids=list(event.ids),
            block_size=self._block_size,
            lora_id=None,
            medium=self._medium,
            lora_name=None,
            group_idx=event.group,
            kv_cache_spec_kind="full_attention" if window is None else "sliding_window",
            kv_cache_spec_sliding_window=window,
        )

    def _send(self, events: Sequence[_Stored | _Removed | _Cleared]) -> None:
        batch, number = msgspec.msgpack.encode(_Batch(time.time(), events)), self._next.to_bytes(8, "big")
        self._next += 1
        if self._replay is not None:
            self._sent.append((number, batch))
            self._sent_bytes += len(batch)
            # A replay has to fit into the socket's queue, which may count up to half of its places as taken after they
            # were freed.
            while self._sent_bytes > _REPLAY_BYTES or len(self._sent) > _WAITING // 2:
                self._sent_bytes -= len(self._sent.popleft()[1])
        self._publisher.send_multipart((self._topic, number, batch))

    # -- replaying ---------------------------------------------------------------------------------------------

    def _replay_all(self) -> None:
        """Answer [client, empty, number] with all kept messages from that number on, until the context ends."""
        assert self._replay is not None
        with self._replay as socket:
            try:
                while True:
                    client, *request = socket.recv_multipart()
                    if len(request) == 2 and len(request[1]) == 8:
                        for number, batch in list(self._sent):
                            if number >= request[1]:
                                socket.send_multipart((client, b"", self._topic, number, batch))
                        socket.send_multipart((client, b"", b"", _END, b""))
            except zmq.ContextTerminated:
                pass


def _number(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


@contextmanager
def kv_events(address: str, replay: str | None, topic: str) -> Iterator[KVEvents]:
    """Yields a `KVEvents`, and closes it at the end. Raises ListenError."""
    events = KVEvents(address, replay, topic)
    try:
        yield events
    finally:
        events.close()
