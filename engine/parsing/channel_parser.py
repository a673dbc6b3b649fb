"""Parses an answer of messages in channels into pieces: reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from polarlm.engine.parsing.answer_parser import new_id
from polarlm.engine.parsing.pieces import CallStart, Piece
from polarlm.engine.sampling.channel_reader import ChannelReader, ChannelText, Inline
from polarlm.model_loaders.chat.call_arguments import json_object
from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.model_loaders.chat.channels import Channels

CONSTRAIN = "<|constrain|>"  # models write it before the type of arguments, templates do not show it


def channel_tokens(channels: Channels, control: Mapping[str, int]) -> tuple[int, ...]:
    """The control tokens that a parser has to see in the text. control: name → id."""
    return tuple(control[name] for name in (*channels.tokens, CONSTRAIN) if name in control)


class ChannelParser:
    def __init__(
        self, channels: Channels, format: CallFormat, names: Collection[str], *, is_begun: bool, inline: bool
    ) -> None:
        """format: how calls are written. names: the functions that may be called. is_begun: whether the prompt ends
        with the header of the text. inline: whether reasoning is text, with its header and its end."""
        self._inline = Inline(channels) if inline else None
        self._reader = ChannelReader(channels, to=format.opening, names=names, is_begun=is_begun)
        self.hear: Callable[[str], None] = lambda text: None  # see `sampling.detokenizer.Parser`
        self._reader.hear = lambda text: self.hear(text)
        self._arguments = ""  # arguments of the last call
        self.calls = 0  # calls that have begun
        self.is_cut_off = False  # at the end of the answer: whether it ends inside a call, or before a message's text

    @property
    def held(self) -> int:
        return self._reader.held

    def push(self, text: str) -> list[Piece]:
        return [piece for one in self._reader.push(text) for piece in self._pieces(one)]

    def finish(self, *, cut: bool = False, next: str = "") -> list[Piece]:
        """The remaining pieces, without an incomplete header. cut: whether the model did not end the answer."""
        in_header = self._reader.is_in_header
        pieces = [piece for one in self._reader.finish() for piece in self._pieces(one)]
        self.is_cut_off = (cut and in_header) or (self.calls > 0 and json_object(self._arguments) is None)
        return pieces

    def _pieces(self, channel_text: ChannelText) -> list[Piece]:
        pieces, kind, text = [], channel_text.kind, channel_text.text
        if self._inline is not None:
            pieces = [Piece(shown)] if (shown := self._inline.text(channel_text)) else []
        elif kind in ("reasoning", "text"):
            pieces = [Piece(text) if kind == "text" else Piece(reasoning=text)]
        if kind == "call":
            self.calls, self._arguments = self.calls + 1, ""
            pieces.append(Piece(call=CallStart(self.calls - 1, new_id(), text)))
        elif kind == "arguments":
            self._arguments += text
            pieces.append(Piece(arguments=text))
        return pieces
