"""Sequences with holes: blocks that later tokens do not see, while all others stay as and where they were.

What is left of a prompt is a prompt of its own: its ids are those that are left, their positions for RoPE are the old
ones, and its salt names all tokens up to the end of the last hole and what of them is left. So the prefix cache and
tiers know it as any other. Its blocks are those of the prompt with fewer holes, under further names: nothing is copied.
Tokens behind a hole that were read before it was one have seen what was there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from polarlm.engine.state.image_positions import ImagePositions
from polarlm.engine.state.prefix import PrefixCache
from polarlm.model_loaders.forks import cached_property

_MOST_STEPS = 8  # fewer holes than a prompt has, with which an earlier one is looked for


@dataclass(frozen=True)
class Holes:
    """The holes of a prompt with the ids `whole`: the numbers of the blocks of `size` tokens that they take. salt: of
    the prompt without holes."""

    whole: tuple[int, ...]
    blocks: tuple[range, ...]
    size: int
    salt: str

    @cached_property
    def kept(self) -> np.ndarray:
        """(tokens of the prompt,) bool: which are left."""
        kept = np.ones(len(self.whole), bool)
        for blocks in self.blocks:
            kept[blocks.start * self.size : blocks.stop * self.size] = False
        return kept

    @property
    def removed(self) -> int:
        """The number of tokens that are not left."""
        return sum(map(len, self.blocks)) * self.size

    @cached_property
    def ids(self) -> list[int]:
        return [self.whole[at] for at in np.flatnonzero(self.kept)]

    @property
    def own_salt(self) -> str:
        if not self.blocks:
            return self.salt
        end = self.blocks[-1].stop * self.size
        named = np.array(
            [*self.whole[:end], *(edge for one in self.blocks for edge in (one.start, one.stop))], np.int64
        )
        return f"{self.salt} without {hashlib.blake2b(named.tobytes(), digest_size=16).hexdigest()}"

    @property
    def positions(self) -> ImagePositions:
        """Those of the tokens that are left, and of what follows."""
        return _Positions((), None, np.flatnonzero(self.kept[: self.blocks[-1].stop * self.size]), self.removed)

    def first(self, count: int) -> Holes:
        return replace(self, blocks=self.blocks[:count])


@dataclass(frozen=True)
class _Positions(ImagePositions):
    """own: the positions of the rows before the end of the last hole. removed: tokens that the holes take."""

    own: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    removed: int = 0

    def positions(self, start: int, count: int) -> np.ndarray:
        own, after = self.own[start : start + count], np.arange(max(start, len(self.own)), start + count)
        return np.concatenate([own, after + self.removed])


def rename_blocks(prefixes: PrefixCache, holes: Holes) -> None:
    """Let the prefix cache find what is left of a prompt whose complete blocks are stored with fewer holes: before it
    was edited, or edited last. The tokens of an incomplete last block are computed again."""
    names = _names(prefixes, holes)
    found = _stored(prefixes, holes, names)
    for count in range(len(holes.blocks) - 1, -1, -1):
        if count and len(holes.blocks) - count > _MOST_STEPS:
            continue
        source = holes.first(count)
        earlier_names = _names(prefixes, source)
        stored = _stored(prefixes, source, earlier_names)
        earlier = dict(zip(_numbers(source)[:stored], earlier_names, strict=False))
        left = [
            (name, earlier[number]) for number, name in zip(_numbers(holes), names, strict=False) if number in earlier
        ]
        if len(left) > found:
            prefixes.rename(prefixes.root(holes.own_salt), prefixes.root(source.own_salt))
            for name, of in left:
                prefixes.rename(name, of)
            found = len(left)
        if stored and _numbers(source)[stored - 1] >= holes.blocks[-1].stop:
            break


def _names(prefixes: PrefixCache, holes: Holes) -> list[bytes]:
    return prefixes.hashes(holes.ids, holes.own_salt)[1]


def _stored(prefixes: PrefixCache, holes: Holes, names: Sequence[bytes]) -> int:
    """How many of the complete blocks that are left, from the first on, are stored."""
    first = prefixes.find_full(prefixes.root(holes.own_salt), holes.ids[: holes.size])
    stored = [first, *map(prefixes.find_complete, names[1:])][: len(names)]
    return next((count for count, blocks in enumerate(stored) if None in blocks), len(stored))


def _numbers(holes: Holes) -> list[int]:
    """The numbers of the blocks that are left, in order."""
    return [number for number in range(len(holes.whole) // holes.size) if holes.kept[number * holes.size]]
