"""Tells routers which blocks this server has, in messages over ZeroMQ in the format of vLLM 0.26 and later.

A message has three parts: the topic, its number (8 bytes, big-endian), and a batch in MessagePack:
[seconds since 1970, [events], 0]. An event is a map whose "type" is its name. The first and the last message of a
server are AllBlocksCleared. Numbers increase by one, starting with the milliseconds since 1970: a subscriber takes a
message with a lower number than the one before for an old one.

The engine's thread only puts changes into a queue. A block's hash is the first 8 bytes of its key in the prefix cache,
as a number. Blocks with a cache salt are left out: a salt keeps clients apart, and a message contains tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import msgspec
import zmq

from polarlm.engine import Engine
from polarlm.server.running.listening import ListenError

_MOST_EVENTS = 256  # of a message
_WAITING = 100_000  # messages that wait for a slow subscriber, which misses further ones
_LAST_MILLISECONDS = 500  # time for the last messages to be sent
_CLEARED = {"type": "AllBlocksCleared"}


class KVEvents:
    """Publishes changes of an engine's blocks, from `watch` until `close`."""

    def __init__(self, address: str, topic: str = "") -> None:
        """Raises ListenError."""
        self._topic = topic.encode()
        self._changes: SimpleQueue[tuple[int, bytes, bytes | None, Sequence[int] | None] | None] = SimpleQueue()
        self._context = zmq.Context()
        self._next = time.time_ns() // 1_000_000  # on average, far less than one message a millisecond is sent
        self._thread = threading.Thread(target=self._publish_all, name="kv-events", daemon=True)
        self._publisher: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(_WAITING)
        self._publisher.linger = _LAST_MILLISECONDS
        try:
            self._publisher.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ListenError(f"--kv-events {address}: cannot publish there: {error.strerror}") from None

    def watch(self, engine: Engine) -> None:
        """Publish what `engine` stores and removes from now on. It must not have served a request yet."""
        self._shape = engine.cache_shape
        self._medium = "GPU" if engine.status().threads is None else None
        self._thread.start()
        engine.watch_blocks(lambda *change: self._changes.put(change))

    def close(self) -> None:
        """Publish the remaining changes and that all blocks are gone, then stop."""
        self._changes.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=_LAST_MILLISECONDS)

    def _publish_all(self) -> None:
        self._send([_CLEARED])
        published: set[tuple[int, bytes]] = set()
        is_open = True
        while is_open:
            changes = [self._changes.get()]
            changes += [self._changes.get() for _ in range(min(self._changes.qsize(), _MOST_EVENTS - 1))]
            is_open = None not in changes
            if events := [*self._events(filter(None, changes), published)]:
                self._send(events)
        self._send([_CLEARED])

    def _events(self, changes: Iterable[Any], published: set[tuple[int, bytes]]) -> Iterator[dict[str, Any]]:
        """Yield changes in vLLM's shape, those of consecutive blocks in one. published: blocks; updated."""
        event: dict[str, Any] = {}
        end: bytes | None = None  # the key of the last block of `event`
        for group, key, parent, ids in changes:
            block, kind = (group, key), "BlockRemoved" if ids is None else "BlockStored"
            if ids is None and block not in published:  # it has a salt
                continue
            follows = event.get("type") == kind and event["group_idx"] == group and (ids is None or end == parent)
            if not follows:
                if event:
                    yield event
                event = {"type": kind, "block_hashes": [], "medium": self._medium, "group_idx": group}
                event |= {} if ids is None else self._fields(group, parent)
            event["block_hashes"].append(int.from_bytes(key[:8], "big"))
            if ids is None:
                published.remove(block)
            else:
                event["token_ids"] += ids
                published.add(block)
                end = key
        if event:
            yield event

    def _fields(self, group: int, parent: bytes | None) -> dict[str, Any]:
        window, _ = self._shape.groups[group]
        return {
            "parent_block_hash": None if parent is None else int.from_bytes(parent[:8], "big"),
            "token_ids": [],
            "block_size": self._shape.block_size,
            "lora_id": None,
            "lora_name": None,
            "kv_cache_spec_kind": "full_attention" if window is None else "sliding_window",
            "kv_cache_spec_sliding_window": window,
        }

    def _send(self, events: Sequence[dict[str, Any]]) -> None:
        batch, number = msgspec.msgpack.encode([time.time(), events, 0]), self._next.to_bytes(8, "big")
        self._next += 1
        self._publisher.send_multipart((self._topic, number, batch))
