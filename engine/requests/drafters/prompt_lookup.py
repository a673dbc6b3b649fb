"""Prompt lookup: a draft repeats what followed the newest tokens earlier in the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from polarlm.engine.requests.drafters.drafter import Drafter

NGRAM = 4  # newest tokens that ngram-simple looks for


class PromptLookup(Drafter):
    """Drafts the tokens that followed the latest earlier occurrence of the newest `size` tokens in the sequence; a
    draft that reaches its end repeats itself. An index maps each n-gram to the position after it."""

    def __init__(self, size: int, vocabulary: int, ids: Sequence[int] = ()) -> None:
        """vocabulary: the number of ids. ids: the prompt, which is indexed here."""
        self._size, self._vocabulary = size, vocabulary
        self._modulus = vocabulary**size
        self._read = 0  # number of indexed ids
        self._run = 0  # the newest n-gram: its ids are the digits of a number in base `vocabulary`
        self._places: dict[int, int] = {}  # n-gram → the position after its latest occurrence
        self._earlier: int | None = None  # the position after the previous occurrence of the newest n-gram
        self.read(ids)

    def read(self, ids: Sequence[int]) -> None:
        """Index the new ones of `ids`."""
        run, places, earlier = self._run, self._places, self._earlier
        for place in range(self._read, len(ids)):
            run = (run * self._vocabulary + ids[place]) % self._modulus
            if place + 1 >= self._size:
                earlier = places.get(run)
                places[run] = place + 1
        self._read, self._run, self._earlier = len(ids), run, earlier

    def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        self.read(ids)
        if self._earlier is None:
            return ()
        following = ids[self._earlier : self._earlier + most]
        while len(following) < most:
            following = [*following, *following][:most]
        return [*takewhile(lambda token: token < self._vocabulary, following)]  # rows of images are no tokens

    def is_ready(self, ids: Sequence[int]) -> bool:
        self.read(ids)
        return self._earlier is not None
