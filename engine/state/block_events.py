"""What changes in the prefix cache, for routers: complete blocks that become findable, and those that no longer are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class BlockStored(NamedTuple):
    """A complete block of a group of layers can be found.

    key: the chained hash at its end, 16 bytes. before: the one before it; None for the first block. ids: its tokens.
    """

    group: int
    key: bytes
    before: bytes | None
    ids: tuple[int, ...]


class BlockRemoved(NamedTuple):
    """A complete block of a group of layers can no longer be found."""

    group: int
    key: bytes


Watch = Callable[[BlockStored | BlockRemoved], None]
