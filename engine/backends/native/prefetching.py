"""Prefetch hints in recorded steps: products prefetch the full-precision blocks that the next attention reads."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.native.kernels.attention.steps import AttendArguments
from polarlm.engine.backends.native.kernels.prefetch import PIECE, PieceArguments, PrefetchHint, list_pieces
from polarlm.engine.backends.native.launch import HostCall, Recorded, Recording
from polarlm.engine.jit.lang.records import words


def add_prefetches(recording: Recording) -> None:
    """Let the products before each attention prefetch the full-precision blocks that it reads.

    All layers with the same table have the same list of pieces. A launch before the first of these layers makes it, so
    the products before that layer prefetch nothing.
    """
    launches: list[Recorded | HostCall] = []
    lists: dict[int, np.ndarray] = {}  # address of a table's headers → its pieces
    products: list[int] = []  # indices, since the last attention, of products with time to prefetch
    for launch in recording.launches:
        if isinstance(launch, HostCall):
            launches.append(launch)
            continue
        if launch.kernel.arguments is AttendArguments and products:
            table = launch.number("headers")
            if table in lists:
                keys, values, first = launch.number("full_k"), launch.number("full_v"), 0
                # The last product takes the first pieces, as many as it can: lines prefetched early may be evicted.
                for number in reversed(products):
                    product = launches[number]
                    assert isinstance(product, Recorded)
                    hint = words(PrefetchHint(keys=keys, values=values, pieces=lists[table], first=first))
                    launches[number] = product.with_array("hint", hint)
                    first += product.spare
            else:
                launches.append(listing := _listing(launch))
                lists[table] = listing.arrays["pieces"]
            products = []
        if launch.spare:
            products.append(len(launches))
        launches.append(launch)
    recording.launches = launches


def _listing(attention: Recorded) -> Recorded:
    """A launch of `list_pieces` for the full-precision blocks that an attention reads."""
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
