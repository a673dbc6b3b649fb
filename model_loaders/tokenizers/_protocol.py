"""The interface of all kinds of tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Pair:
    """How two texts become one sequence: its first id, a text, the ids `between`, the other text, the closing id.

    second_type: whether the ids after `between` have the second type of tokens.
    """

    between: tuple[int, ...]  # at least one
    second_type: bool


class Tokenizer(Protocol):
    """Text to ids and back. Ids are the rows of the model's embedding.

    A *control token* is one that the model's authors flagged special ("<|im_end|>", "</s>"): it steers the model and
    is not text. Added tokens without that flag ("<tool_call>") are ordinary text.
    """

    vocab_size: int  # ids are 0 .. vocab_size-1; the embedding may have more rows, as padding
    bos_id: int | None  # the first id of a sequence; None if the model wants none
    eos_ids: frozenset[int]  # every id that ends a generation
    closing_id: int | None  # the id that follows a text whose vector is asked for; None if the model wants none
    pair: Pair | None  # how two texts are joined; None if the files do not say it
    strips_leading_space: bool  # tokenizing adds a space to the first text of a sequence, and detokenizing removes it
    adds_space_after_control: bool  # tokenizing adds a space to a text that follows a control token
    left_out: tuple[range, frozenset[int]]  # ids without a row in the embedding: of the vocabulary, of files beside it

    def keep_rows(self, rows: int) -> None:
        """Leave out ids from `rows` on, which the embedding lacks: no text has them, and no sequence begins or ends
        with one. The names of such control tokens become plain text."""

    def tokenize(self, text: str, *, control: bool = False, continued: bool = False, mark: str = "") -> list[int]:
        """The ids of `text`, without BOS and EOS, and never truncated.

        control: names of control tokens in `text` become their ids; otherwise they stay plain text.
        continued: `text` follows other text of the same sequence, so no leading space is added to it.
        mark: a character that is removed after control strings were found, so that it can hide some of them.
        """

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of ids of `text`, found without tokenizing it."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id contributes to text, b"" for a control token. Raises ValueError for an unknown id."""

    def control_tokens(self) -> Mapping[str, int]:
        """Name → id of the strings that `tokenize(..., control=True)` turns into one control id."""

    def token_name(self, token_id: int) -> str:
        """The token in readable form, for logs. Raises ValueError for an unknown id."""
