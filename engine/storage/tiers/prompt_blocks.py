"""The blocks of a prompt that one engine computes for another, on a weaker machine.

The engine sends the token ids. A server with the same model and encoding computes them, and sends the blocks that the
engine lacks, in order, each with the snapshot of recurrent layers at its end, if there is one:

    POST URL/blocks   {"model": its name, "ids", "first": the number of the first block to send, "root": the hash, in
                       hexadecimal digits, that the engine's chain of hashes begins with, "settings": its
                       `identity.settings`, "cache_salt"}
    → objects: blocks as tiers have them, under the names in `NAMES`, and notes: {"tokens"} computed, an {"error"}, or
      nothing, as a sign of life
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from polarlm.engine.state.prefix import hash_blocks
from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.tiers.names import ObjectNames
from polarlm.engine.storage.tiers.stored_blocks import StoreAccess, StoredBlocks

NAMES = ObjectNames(b"", b"")
"""Names of blocks on their way: the hashes that they are made of begin with the root of the engine that asks."""
NOTE = bytes(16)
"""The name of notes."""
_AT_ONCE = 16  # blocks that are copied at a time, while the engine waits


def note(**fields: Any) -> bytes:
    return b"".join(Object(fields).pack(NOTE))


def packed_blocks(
    access: StoreAccess,
    hold: Callable[[], AbstractContextManager[None]],
    ids: Sequence[int],
    salt: str,
    root: bytes,
    first: int,
) -> Iterator[bytes]:
    """Yield the objects of a computed prompt from block `first` on, named for an engine whose hashes begin with `root`.
    hold: holds the engine's lock."""
    stored, n = StoredBlocks(access), access.store.shape.block_size
    (own_root, own), named = access.prefixes.hashes(ids, salt), hash_blocks(root, ids, n)
    dense, sparse = ~stored.sparse_groups, stored.sparse_groups
    for start in range(first, len(own), _AT_ONCE):
        numbers = range(start, min(start + _AT_ONCE, len(own)))
        with hold():
            blocks = dict(stored.read_quantized([own[number] for number in numbers if number], dense))
            states = dict(stored.read_quantized([own[number] for number in numbers if number], sparse))
            if start == 0 and (block := stored.read_full(own_root, ids[:n])) is not None:
                blocks[own[0]] = block
        for number in numbers:
            if (block := blocks.get(own[number])) is not None:
                yield b"".join(block.pack(NAMES.block(named[number])))
            if (state := states.get(own[number])) is not None:
                yield b"".join(state.pack(NAMES.state(named[number])))
    if own and (rest := ids[len(own) * n :]):
        with hold():
            tail = stored.read_full(own[-1], rest)
        if tail is not None:
            yield b"".join(tail.pack(NAMES.tail(named[-1])))
