"""Splits an answer of messages in channels into reasoning, text and calls while it is generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from polarlm.engine.sampling.detokenizer import overlap
from polarlm.model_loaders.chat.channels import Channels

Kind = Literal["reasoning", "text", "call", "arguments"]
_MOST_HEADER = 512  # characters of a header; a longer one is text


@dataclass(frozen=True)
class ChannelText:
    """Text of one kind in an answer, or the name of a function whose arguments follow."""

    kind: Kind
    text: str


class ChannelReader:
    """Splits an answer while it is generated. The texts do not depend on how it is cut into chunks.

    Messages of one kind are separated by an empty line. A message without a header is text, and so is one to a
    recipient that is no function of the request, unless its channel is the one for reasoning.
    """

    def __init__(
        self, channels: Channels, *, to: str = "", names: Collection[str] = (), is_begun: bool = False
    ) -> None:
        """to: what precedes the name of a function in a header. is_begun: whether the prompt has the first header."""
        self.hear: Callable[[str], None] = lambda text: None  # see `detokenizer.Parser`
        self._channels, self._to, self._names = channels, to.strip(), frozenset(names)
        self._state: Callable[[], list[ChannelText] | None] = self._message if is_begun else self._header
        self._kind: Kind = "text"
        self._pending = ""
        self._last: Kind | None = None  # kind of the last text
        self._is_new = False  # whether the message has no text so far

    @property
    def held(self) -> int:
        """How many characters may be a header or the end of a message."""
        return len(self._pending)

    @property
    def is_in_header(self) -> bool:
        """Whether text is held back that may be a header."""
        return self._state == self._header and bool(self._pending)

    def push(self, text: str) -> list[ChannelText]:
        """The texts that `text` completes."""
        self._pending += text
        texts: list[ChannelText] = []
        while (more := self._state()) is not None:
            texts += more
        return texts

    def finish(self) -> list[ChannelText]:
        """The remaining text at the end of the answer; the beginning of a header is dropped."""
        pending, self._pending = self._pending, ""
        return self._texts(pending) if self._state == self._message else []

    def _header(self) -> list[ChannelText] | None:
        """State: before the text of a message."""
        channels = self._channels
        header, separator, rest = self._pending.partition(channels.message)
        begins = [channels.start, channels.channel, *([self._to] if self._to else [])]
        text = header.lstrip()
        if not any(text.startswith(begin) or begin.startswith(text) for begin in begins) or len(text) > _MOST_HEADER:
            self._begin("text", self._pending)
            return []
        if not separator:
            return None
        match = re.search(rf"(?:^|\s){re.escape(self._to)}([^\s<]+)", header) if self._to else None
        channel = re.match(r"\w*", header.partition(channels.channel)[2])
        if match is not None and match[1] in self._names:
            self._begin("arguments", rest)
            self._last, self._is_new = "arguments", False
            return [ChannelText("call", match[1])]
        self._begin("reasoning" if channel is not None and channel[0] == channels.reasoning else "text", rest)
        return []

    def _begin(self, kind: Kind, text: str) -> None:
        self._kind, self._pending, self._is_new, self._state = kind, text, True, self._message

    def _message(self) -> list[ChannelText] | None:
        """State: in the text of a message, which ends where the next one begins, too."""
        ends = (self._channels.end, self._channels.start)
        places = [at for end in ends if (at := self._pending.find(end)) >= 0]
        if places:
            text, self._pending = self._pending[: min(places)], self._pending[min(places) :]
            texts = self._texts(text)
            self._pending = self._pending.removeprefix(self._channels.end)
            self._state = self._header
            return texts
        keep = max(overlap(self._pending, end) for end in ends)
        text, self._pending = self._pending[: len(self._pending) - keep], self._pending[len(self._pending) - keep :]
        return self._texts(text) if text else None

    def _texts(self, text: str) -> list[ChannelText]:
        if not text:
            return []
        if self._kind == "text":
            self.hear(text)
        gap = "\n\n" if self._is_new and self._last == self._kind else ""
        self._is_new, self._last = False, self._kind
        return [ChannelText(self._kind, gap + text)]


class Inline:
    """Turns the texts of an answer into one, in which reasoning has the header and the end of its message."""

    def __init__(self, channels: Channels) -> None:
        self._open, self._close = channels.header(channels.reasoning), channels.end
        self._thinks = False  # whether reasoning is open

    def text(self, channel_text: ChannelText) -> str:
        """The text that one in a channel adds: reasoning and text, and before a call the end of reasoning."""
        was, self._thinks = self._thinks, channel_text.kind == "reasoning"
        edge = "" if was == self._thinks else self._open if self._thinks else f"{self._close}\n\n"
        return edge + channel_text.text if channel_text.kind in ("reasoning", "text") else edge
