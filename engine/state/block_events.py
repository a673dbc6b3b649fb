"""Events of the prefix cache, for routers: a complete block has become findable, or is not findable any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class BlockStored(NamedTuple):
    """A complete block of a group of layers has become findable.

    key: the chained hash at its end, 16 bytes. before: that at its start; None for the first block. ids: its tokens.
    """

    group: int
    key: bytes
    before: bytes | None
    ids: tuple[int, ...]


class BlockRemoved(NamedTuple):
    """A complete block of a group of layers is not findable any more."""

    group: int
    key: bytes


Watch = Callable[[BlockStored | BlockRemoved], None]
