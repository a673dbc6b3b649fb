"""Edits of a conversation before it is answered: a summary for its beginning, old results and reasoning cleared.

They act on messages as `read_messages` returns them. What an edit leaves is written as it was, so that a prompt begins
with the prompt of the turn before, up to the first thing that is cleared.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Size = Callable[[Sequence[Message]], int]  # the tokens of messages as a prompt

INSTRUCTION = (
    "Summarize our conversation so that it can go on from your summary alone: the task, facts, decisions, what was "
    "done and what it gave, files and code in use, open questions, and the next step. Answer with the summary, and "
    "call no tool."
)
"""What asks for a summary, as the user's last message: all before it is in the cache."""

_HEAD = "This is a summary of our conversation so far, which goes on behind it:\n\n"
_OURS = "polarlm:"  # begins what the base64 of a summary of this server says
_CLEARED = "[This result was cleared to make room.]"


@dataclass(frozen=True)
class Compaction:
    instruction: str = INSTRUCTION
    threshold: int = 0  # a longer prompt, in tokens, is compacted; 0: every one
    goes_on: bool = False  # whether an answer to the compacted conversation follows the summary


@dataclass(frozen=True)
class ClearThinking:
    """Reasoning leaves all turns but the last `keep` ones that have some. A turn is what stands between two messages of
    the user's."""

    keep: int
    least: int = 0  # tokens that it must clear

    def clear(self, messages: Sequence[Message], size: Size) -> tuple[list[Message], int]:
        """The messages without it, and the number of turns that have lost some."""
        turns = [sum(one["role"] == "user" for one in messages[:index]) for index in range(len(messages))]
        with_reasoning = sorted({turn for turn, one in zip(turns, messages, strict=True) if _reasoning(one)})
        cleared = with_reasoning[: max(0, len(with_reasoning) - self.keep)]
        return [
            _without_reasoning(one) if turn in cleared and _reasoning(one) else one
            for turn, one in zip(turns, messages, strict=True)
        ], len(cleared)


@dataclass(frozen=True)
class ClearToolUses:
    """A text takes the place of the results of all calls but the last `keep` ones."""

    tokens: int | None  # a prompt of more tokens is edited; None: one of more calls than `calls`
    calls: int = 0
    keep: int = 3
    least: int = 0  # tokens that it must clear
    excluded: Collection[str] = ()  # functions that keep their results
    inputs: Collection[str] | bool = False  # functions whose calls lose their arguments, too; True: all

    def clear(self, messages: Sequence[Message], size: Size) -> tuple[list[Message], int]:
        """The messages without them, and the number of calls whose results were cleared."""
        calls = list(_calls(messages))
        is_due = len(calls) > self.calls if self.tokens is None else size(messages) > self.tokens
        if not is_due:
            return [*messages], 0
        edited, cleared = [*messages], 0
        for at, number, result in calls[: max(0, len(calls) - self.keep)]:
            function = messages[at]["tool_calls"][number]["function"]
            if function["name"] in self.excluded or messages[result]["content"] == _CLEARED:
                continue
            cleared += 1
            edited[result] = {**messages[result], "content": _CLEARED}
            if self.inputs is True or (self.inputs and function["name"] in self.inputs):
                each = [*edited[at]["tool_calls"]]
                each[number] = {**each[number], "function": {**function, "arguments": "{}"}}
                edited[at] = {**edited[at], "tool_calls": each}
        return edited, cleared


Clearing = ClearThinking | ClearToolUses
Edit = Clearing | Compaction


@dataclass(frozen=True)
class EditedPrompt:
    prompt: Sequence[Message]
    cleared: tuple[tuple[Clearing, int, int], ...]  # (edit, how many things, tokens) of each one that was done
    compaction: Compaction | None  # which the prompt is long enough for


def edit(prompt: Sequence[Message], edits: Sequence[Edit], count: Size) -> EditedPrompt:
    """The prompt after all edits, in their order, but for a compaction, which comes last. Raises what `count` raises,
    which is called once for each state of the prompt, and for none if no edit has to know."""
    sizes: list[tuple[Sequence[Message], int]] = []

    def size(messages: Sequence[Message]) -> int:
        for known, tokens in sizes:
            if known is messages:
                return tokens
        sizes.append((messages, count(messages)))
        return sizes[-1][1]

    done: list[tuple[Clearing, int, int]] = []
    compaction: Compaction | None = None
    for one in edits:
        if isinstance(one, Compaction):
            compaction = one
            continue
        edited, number = one.clear(prompt, size)
        if number and (tokens := size(prompt) - size(edited)) >= one.least:
            prompt = edited
            done.append((one, number, tokens))
    is_due = compaction is not None and (not compaction.threshold or size(prompt) > compaction.threshold)
    return EditedPrompt(prompt, tuple(done), compaction if is_due else None)


def mark_cleared_results(messages: Sequence[Message], edited: Sequence[Message]) -> list[Message]:
    """The edited messages, but cleared results as they were, marked for the engine, which leaves their blocks out."""
    pairs = [*zip(messages, edited, strict=True)]
    return [{**old, "left_out": True} if old is not new and new["content"] == _CLEARED else new for old, new in pairs]


def compact(messages: Sequence[Message], summary: str) -> list[Message]:
    """The messages from a summary on: the system's, the summary as the user's, and the user's last message, which is
    still to be answered unless the user says more."""
    system = [one for one in messages if one["role"] == "system"]
    asked = [one for one in messages if one["role"] == "user" and not is_summary(one)]
    return [*system, {"role": "user", "content": _HEAD + summary}, *asked[-1:]]


def is_summary(message: Message) -> bool:
    return str(message["content"]).startswith(_HEAD)


def seal(summary: str) -> str:
    """A summary as the member `encrypted_content` has it: text of this server, which needs no key."""
    return base64.b64encode((_OURS + summary).encode("utf-8", "replace")).decode("ascii")


def summary_in(part: Mapping[str, Any]) -> str:
    """The summary in a block or an item of type "compaction"; "" if it has none that this server can read."""
    for name in ("content", "text"):
        if isinstance(text := part.get(name), str) and text.strip():
            return text
    try:
        sealed = base64.b64decode(part.get("encrypted_content") or "", validate=True).decode()
    except (binascii.Error, TypeError, ValueError):
        return ""
    return sealed.removeprefix(_OURS) if sealed.startswith(_OURS) else ""


def _reasoning(message: Message) -> bool:
    return bool(message.get("reasoning_content"))


def _without_reasoning(message: Message) -> Message:
    """The message without its reasoning; "token_ids" keep the ids of it out that the engine may know."""
    return {name: value for name, value in message.items() if name != "reasoning_content"} | {"token_ids": None}


def _calls(messages: Sequence[Message]) -> Iterator[tuple[int, int, int]]:
    """(index of the message, number in it, index of the result) of each call that has a result."""
    for at, message in enumerate(messages):
        ids = {call["id"]: number for number, call in enumerate(message.get("tool_calls", ()))}
        for result in range(at + 1, len(messages) if ids else 0):
            if messages[result]["role"] != "tool":
                break
            if (number := ids.get(messages[result]["tool_call_id"])) is not None:
                yield at, number, result
