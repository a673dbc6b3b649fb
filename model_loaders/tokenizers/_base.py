"""What all kinds of tokenizer have in common: control tokens, which are kept apart from text."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from polarlm.model_loaders.errors import panics_told

# Unicode's white space; Python counts U+001C to U+001F as well.
SPACE = "\t\n\v\f\r \u0085\u00a0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_OF_WORD = re.compile(r"\w")
NO_ID = 2**32 - 1  # how GGUF files write that there is none


@dataclass(frozen=True)
class Pair:
    """How two texts become one sequence: its first id, a text, the ids `between`, the other text, the closing id.

    second_type: whether the ids after `between` have the second type of tokens.
    """

    between: tuple[int, ...]  # at least one
    second_type: bool


@dataclass(frozen=True)
class SpecialIds:
    """The ids that a sequence begins with (None: nothing) and that end a generation.

    closing_id: the id that follows a text whose vector is asked for; None: nothing. pair: how two texts are joined;
    None: not at all.
    """

    bos_id: int | None
    eos_ids: frozenset[int]
    closing_id: int | None = None
    pair: Pair | None = None


@dataclass(frozen=True)
class Edges:
    """What a control token does at its edges: which characters of white space before and after it it removes, and
    whether it is one only as a word of its own, without letters, digits and underscores around it."""

    before: str = ""
    after: str = ""
    are_of_word: bool = False


class Tokenizer(ABC):
    """Text to ids and back. Ids are the rows of the model's embedding, 0 to vocab_size − 1, which may have more rows.

    A *control token* is one that the model's authors flagged special ("<|im_end|>", "</s>"): it steers the model and
    is not text. Added tokens without that flag ("<tool_call>") are ordinary text. The libraries get only plain text:
    control strings are found here, in the same way for all kinds.

    bos_id, eos_ids, closing_id, pair: see `SpecialIds`. strips_leading_space: tokenizing adds a space to the first text
    of a sequence, and detokenizing removes it. adds_space_after_control: tokenizing adds a space to a text that follows
    a control token. left_out: ids without a row in the embedding: of the vocabulary, and of the files next to it.
    """

    def __init__(
        self,
        vocab_size: int,
        control: Mapping[str, int],
        special: SpecialIds,
        space: tuple[bool, bool] = (False, False),
        *,
        edges: Mapping[str, Edges] = MappingProxyType({}),
    ) -> None:
        """space: whether tokenizing adds a space at the start of a text, and after control tokens. edges: of the
        added tokens that are not found everywhere or remove white space."""
        self.vocab_size = vocab_size
        self.bos_id, self.eos_ids = special.bos_id, special.eos_ids
        self.closing_id, self.pair = special.closing_id, special.pair
        self.strips_leading_space, self.adds_space_after_control = space
        self._edges = edges
        self.left_out: tuple[range, frozenset[int]] = range(0), frozenset()
        self._set_control(control)

    def _set_control(self, control: Mapping[str, int]) -> None:
        self._control = {string: token_id for string, token_id in control.items() if string}
        self._control_names = {token_id: string for string, token_id in self._control.items()}
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def keep_rows(self, rows: int) -> None:
        """Leave out ids from `rows` on, which the embedding lacks: no text has them, and no sequence begins or ends
        with one. The names of such control tokens become plain text."""
        special = self.eos_ids | {one for one in (self.bos_id, self.closing_id) if one is not None}
        missing_ids = frozenset(one for one in special if one >= self.vocab_size and one != NO_ID)
        self.left_out = range(rows, self.vocab_size), missing_ids
        self.vocab_size = rows = min(rows, self.vocab_size)
        self.eos_ids = frozenset(one for one in self.eos_ids if one < rows)
        self.bos_id, self.closing_id = (
            one if one is not None and one < rows else None for one in (self.bos_id, self.closing_id)
        )
        if self.pair is not None and max(self.pair.between) >= rows:
            self.pair = None
        self._set_control({string: token_id for string, token_id in self._control.items() if token_id < rows})

    @abstractmethod
    def _tokenize_plain(self, text: str, leading_space: bool) -> list[int]:
        """The ids of non-empty text without control tokens."""

    @abstractmethod
    def _piece_bytes(self, token_id: int) -> bytes:
        """The bytes of an id that is not a control token; b"" for a hole in the numbering."""

    def tokenize(self, text: str, *, control: bool = False, continued: bool = False, mark: str = "") -> list[int]:
        """The ids of `text`, without BOS and EOS, and never truncated.

        control: names of control tokens in `text` become their ids; otherwise they stay plain text.
        continued: `text` follows other text of the same sequence, so no leading space is added to it.
        mark: a character that is removed after control strings were found, so that it can hide some of them.
        """
        ids: list[int] = []
        leading_space = self.strips_leading_space and not continued
        for part in self._split(_valid_unicode(text)) if control else (_valid_unicode(text),):
            if isinstance(part, int):
                ids.append(part)
                leading_space = self.adds_space_after_control
                continue
            plain = part.replace(mark, "") if mark else part
            if plain:
                with panics_told("Tokenizing"):
                    pieces = self._tokenize_plain(plain, leading_space)
                ids += [one for one in pieces if one < self.vocab_size] if self.left_out[0] else pieces
                leading_space = False
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id contributes to text, b"" for a control token. Raises ValueError for an unknown id."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"There is no token {token_id}: ids of this vocabulary are 0 to {self.vocab_size - 1}.")
        return b"" if token_id in self._control_names else self._piece_bytes(token_id)

    def control_tokens(self) -> Mapping[str, int]:
        """Name → id of the strings that `tokenize(..., control=True)` turns into one control id."""
        return MappingProxyType(self._control)

    def token_name(self, token_id: int) -> str:
        """The token in readable form, for logs. Raises ValueError for an unknown id."""
        text = self.token_bytes(token_id)
        return self._control_names.get(token_id) or text.decode("utf-8", "backslashreplace")

    def _split(self, text: str) -> Iterator[str | int]:
        """`text` in parts: plain text, and the ids of control tokens."""
        end = 0
        for match in self._control_pattern.finditer(text):
            edges = self._edges.get(match.group(), Edges())
            around = text[max(0, match.start() - 1) : match.start()], text[match.end() : match.end() + 1]
            if edges.are_of_word and any(map(_OF_WORD.match, around)):
                continue
            yield text[end : match.start()].rstrip(edges.before)
            yield self._control[match.group()]
            end = match.end()
            while end < len(text) and text[end] in edges.after:
                end += 1
        yield text[end:]


def _valid_unicode(text: str) -> str:
    """`text` with U+FFFD for halves of surrogate pairs, which have no UTF-8 form and come from cut JSON escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
