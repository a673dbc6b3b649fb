"""Events of the prefix cache: a complete block has become findable, or is not findable any more (for routers); a block
is about to be allocated again (for tiers)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


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


class LastReader(Protocol):
    """Reads blocks that can be found for the last time. Its methods must not raise."""

    def before_reuse(self, key: bytes, group: int) -> None:
        """The quantized block of `group` that is stored under the hash `key` is about to be allocated again."""

    def before_full_reuse(self, before: bytes, ids: Sequence[int]) -> None:
        """A slot of the full-precision block with `ids` after the hash `before` is about to be allocated again."""
