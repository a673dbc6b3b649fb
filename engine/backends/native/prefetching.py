"""Recorded steps in which products prefetch what the attention after them reads in full precision."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.native.kernels.attention import AttendArguments
from polarlm.engine.backends.native.kernels.prefetch import PIECE, Ahead, PieceArguments, list_pieces
from polarlm.engine.backends.native.launch import Recorded, Recording
from polarlm.engine.jit.lang.records import words


def add_prefetches(recording: Recording) -> None:
    """Let the products before each attention prefetch the blocks that it reads in full precision.

    The pieces of these blocks are the same for all layers that attend to a table. They are listed before the first of
    these layers, so the products before that one prefetch nothing.
    """
    launches: list[Recorded] = []
    lists: dict[int, np.ndarray] = {}  # address of a table → its pieces
    products: list[int] = []  # numbers of those with time to prefetch, since the last attention
    for launch in recording.launches:
        if launch.kernel.arguments is AttendArguments and products:
            table = launch.number("headers")
            if table in lists:
                keys, values, first = launch.number("full_k"), launch.number("full_v"), 0
                # The last product takes the first pieces, all that it can: what is prefetched early may be lost again.
                for number in reversed(products):
                    ahead = words(Ahead(keys=keys, values=values, pieces=lists[table], first=first))
                    launches[number] = launches[number].with_array("ahead", ahead)
                    first += launches[number].spare
            else:
                launches.append(listing := _listing(launch))
                lists[table] = listing.arrays["pieces"]
            products = []
        if launch.spare:
            products.append(len(launches))
        launches.append(launch)
    recording.launches = launches


def _listing(attention: Recorded) -> Recorded:
    """A launch that lists the pieces of the blocks that an attention reads."""
    full, keys = attention.arrays["full"], attention.arrays["full_k"]
    (count, most_full, _), (_, kv_heads, tokens, _) = full.shape, keys.shape
    block_bytes = keys[0, 0].nbytes
    pieces = np.zeros(1 + count * most_full * kv_heads * -(-block_bytes // PIECE), np.int64)
    arguments = PieceArguments(
        headers=attention.number("headers"),
        full=full,
        pieces=pieces,
        sequences=count,
        most_full=most_full,
        kv_heads=kv_heads,
        block_bytes=block_bytes,
        token_bytes=block_bytes // tokens,
        window=attention.number("window"),
    )
    return Recorded(list_pieces(), list_pieces().pack(arguments), 1, 1, {"pieces": pieces}, 0)
