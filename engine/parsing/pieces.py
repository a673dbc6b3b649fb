"""The stream of an answer: pieces, or the whole answer, which every API writes in its own shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from polarlm.engine.outputs import TokenLogprob, Usage
from polarlm.engine.requests.answers import Conversation


@dataclass(frozen=True)
class CallStart:
    index: int  # among the calls of its answer
    id: str
    name: str


@dataclass(frozen=True)
class Progress:
    total: int  # tokens of the prompt
    cached: int  # tokens that were found in the cache
    processed: int  # tokens found in the cache or computed so far


@dataclass(frozen=True)
class Summary:
    """What takes the place of a conversation's beginning, with the usage of the request that wrote it."""

    text: str
    usage: Usage


@dataclass(frozen=True)
class Piece:
    """A piece of an answer. Its parts are in the order of reasoning, text, call, arguments."""

    text: str = ""
    reasoning: str = ""
    call: CallStart | None = None
    arguments: str = ""  # a fragment of the JSON text of the call that began last
    is_custom: bool = False  # whether that is a custom tool's; its arguments are then the text of its input
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()  # in answers to raw prompts
    prompt_ids: tuple[int, ...] = ()  # in the first piece, if the prompt's log-probabilities are requested
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # in the first piece, for all tokens except the first
    summary: Summary | None = None  # in a piece before the answer to a compacted conversation
    finish_reason: str | None = None  # in the last piece: "stop", "length" or "tool_calls"; of a summary: "compaction"
    usage: Usage | None = None  # in the last piece
    stopped_by: str | None = None  # in the last piece: the client's stop string that ended the answer
    progress: Progress | None = None  # in pieces before the first token, if requested
    is_waiting: bool = False  # a keep-alive piece: the next piece has not come yet
    warnings: tuple[str, ...] = ()  # in the first piece, a keep-alive: sentences about what is not done as asked
    prompt_tokens: int = 0  # in the first piece that is not a keep-alive or progress
    cached_tokens: int = 0  # in the same piece: tokens of the prompt that were found in the cache


@dataclass(frozen=True)
class Call:
    """A whole tool call; `arguments` is the text of a JSON object, or the beginning of one; of a custom tool, its
    input."""

    id: str
    name: str
    arguments: str
    is_custom: bool = False

    def to_json(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        if self.is_custom:
            return {"id": self.id, "type": "custom", "custom": {"name": self.name, "input": self.arguments}}
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Answer:
    text: str
    reasoning: str
    calls: tuple[Call, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    usage: Usage
    stopped_by: str | None = None
    summary: Summary | None = None  # of the conversation before it, if that was compacted
    token_ids: tuple[int, ...] = ()  # in an answer to a raw prompt
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


def fold(pieces: Iterable[Piece]) -> Answer:
    parts = list(pieces)
    last = parts[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    calls: list[tuple[CallStart, bool, list[str]]] = []
    for piece in parts:
        if piece.call is not None:
            calls.append((piece.call, piece.is_custom, []))
        if piece.arguments:
            calls[-1][2].append(piece.arguments)
    return Answer(
        text="".join(piece.text for piece in parts),
        reasoning="".join(piece.reasoning for piece in parts),
        calls=tuple(Call(start.id, start.name, "".join(said), is_custom) for start, is_custom, said in calls),
        logprobs=tuple(token for piece in parts for token in piece.logprobs),
        finish_reason=last.finish_reason,
        usage=last.usage,
        stopped_by=last.stopped_by,
        summary=next((piece.summary for piece in parts if piece.summary), None),
        token_ids=tuple(token for piece in parts for token in piece.token_ids),
        prompt_ids=next((piece.prompt_ids for piece in parts if piece.prompt_ids), ()),
        prompt_logprobs=next((piece.prompt_logprobs for piece in parts if piece.prompt_logprobs), ()),
    )


def keep(conversation: Conversation | None, answer: Answer, ids: Sequence[int]) -> None:
    """Keep the ids of an answer with reasoning or calls, which clients send back in another form than its text."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": call.arguments}} for call in answer.calls
        ]
    if conversation and (answer.text or answer.calls) and (answer.reasoning or answer.calls):
        conversation.keep_message(message, ids, reasoned=bool(answer.reasoning))
