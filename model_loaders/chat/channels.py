"""Finds how a model writes answers of several messages, each in a channel, by rendering one through its template.

A message is a header, which names its channel and perhaps a function that it calls, a text, and an end. Reasoning, the
text for the user and calls of functions are messages of one answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from polarlm.model_loaders.chat.call_format import Render


@dataclass(frozen=True)
class Channels:
    """The text around the messages of an answer: `<|start|>assistant<|channel|>analysis<|message|>` … `<|end|>`."""

    start: str  # before the role
    role: str  # the role in an answer's messages; the prompt ends with `start` and `role`
    channel: str  # before the name of a channel
    message: str  # between a header and its text
    end: str
    reasoning: str  # the channel of reasoning
    final: str  # the channel of the text for the user

    @property
    def tokens(self) -> tuple[str, ...]:
        """The texts between the parts of an answer."""
        return self.start, self.channel, self.message, self.end

    @property
    def message_separator(self) -> str:
        """The text between two messages of an answer."""
        return f"{self.end}{self.start}{self.role}"

    def header(self, channel: str) -> str:
        """The header of a message in `channel`, up to its text."""
        return f"{self.channel}{channel}{self.message}"


_QUESTION, _REASONING, _ANSWER = "alphaquestion", "alphareasoning", "alphaanswer"
_TOKEN = r"<\|\w+\|>"
_MESSAGES = re.compile(
    rf"(?P<channel>{_TOKEN})(?P<reasoning>\w+)(?P<message>{_TOKEN}){_REASONING}"
    rf"(?P<end>{_TOKEN})(?P<start>{_TOKEN})(?P<role>\w+)(?P=channel)(?P<final>\w+)(?P=message){_ANSWER}{_TOKEN}"
)


def find_channels(render: Render) -> Channels | None:
    """The channels of the template's answers; None if it has none. Raises LoadError if it cannot run."""
    question = {"role": "user", "content": _QUESTION}
    answer = {"role": "assistant", "content": _ANSWER, "reasoning_content": _REASONING}
    (prompt,) = render([[question]])
    (whole,) = render([[question, answer]], add_generation_prompt=False)
    if not isinstance(prompt, str) or not isinstance(whole, str) or not whole.startswith(prompt):
        return None
    parts = _MESSAGES.fullmatch(whole[len(prompt) :])
    if parts is None or not prompt.endswith(parts["start"] + parts["role"]):
        return None
    return Channels(**parts.groupdict())
