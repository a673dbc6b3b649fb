"""A conversation: its messages, the turns that add to them, and the numbers of a turn."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from engine.config import SamplingParams
from engine.console import Console, ctrl_c_asked
from engine.engine import Engine
from engine.outputs import Usage

_MIB = 1 << 20


@dataclass(frozen=True)
class Turn:
    """What came of one prompt. After Ctrl-C, `finish_reason` is "cancelled" and `usage` None."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage | None


class Session:
    """The messages of a conversation, and its last turn.

    A turn that fails, or is stopped before its first token, leaves the messages as they were: a prompt would
    otherwise hold two messages of the user in a row.
    """

    def __init__(self, engine: Engine, params: SamplingParams, console: Console, system: str | None = None) -> None:
        self.engine, self.params = engine, params
        self._console = console
        self.last: Turn | None = None
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Starts anew with `text` as the system prompt; None leaves it out."""
        self.system = text
        self.clear()

    def clear(self) -> None:
        """Forgets all but the system prompt."""
        self.messages: list[Mapping[str, Any]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})

    def send(self, text: str) -> Turn:
        """Answers a message. Raises EngineError."""
        return self._answer([*self.messages, {"role": "user", "content": text}])

    def regenerate(self) -> Turn | None:
        """Answers the last message once more; None when nothing was answered yet. Raises EngineError."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return None
        return self._answer(self.messages[:-1])

    def complete(self, prompt: str) -> Turn:
        """Goes on from plain text, outside the conversation. Raises EngineError."""
        return self._stream(prompt)

    def _answer(self, messages: list[Mapping[str, Any]]) -> Turn:
        turn = self._stream(messages)
        if turn.token_ids or turn.finish_reason != "cancelled":
            # The ids go along, so that the next prompt starts with exactly the tokens that are in the cache.
            answer = {"role": "assistant", "content": turn.text, "token_ids": turn.token_ids}
            self.messages = [*messages, answer]
        return turn

    def _stream(self, prompt: str | list[Mapping[str, Any]]) -> Turn:
        """Writes the answer as it comes; Ctrl-C ends it after the token, or the piece of the prompt, in progress."""
        pieces: list[str] = []
        ids: list[int] = []
        reason, usage = None, None
        try:
            with ctrl_c_asked() as asked, closing(self.engine.stream(prompt, self.params, progress=True)) as chunks:
                for chunk in chunks:
                    if chunk.prompt_tokens:
                        self._console.prefill(chunk.prefilled, chunk.prompt_tokens)
                    else:
                        self._console.write(chunk.text)
                    pieces.append(chunk.text)
                    ids.extend(chunk.token_ids)
                    reason, usage = chunk.finish_reason, chunk.usage
                    if asked():
                        break
        finally:
            self._console.end_progress()
            self._console.end_answer()
        self.last = Turn("".join(pieces), tuple(ids), reason or "cancelled", usage)
        return self.last


def why_it_ended(turn: Turn, params: SamplingParams) -> str | None:
    """A sentence for an answer that the model did not end itself, else None."""
    if turn.finish_reason == "cancelled":
        return "The answer was stopped." if turn.token_ids else "Stopped before the first token."
    if turn.finish_reason != "length":
        return None
    if 0 <= params.max_tokens <= len(turn.token_ids):
        return f"The answer ends here: it has the {params.max_tokens} tokens that -n/--predict allows."
    return "The answer ends here: the context is full; /clear starts anew, and -c/--ctx-size sets its size."


def numbers(turn: Turn, engine: Engine) -> str:
    """Two lines: the speed of a turn, and the context and the cache of its sequence."""
    speed = f"answer: {len(turn.token_ids)} tokens, stopped"
    if (usage := turn.usage) is not None:
        speed = (
            f"prompt: {usage.prompt_tokens} tokens, {usage.cached_tokens} of them cached, "
            f"{usage.prompt_rate:.1f} tokens/s | "
            f"answer: {usage.completion_tokens} tokens, {usage.generation_rate:.1f} tokens/s"
        )
    cache = engine.cache_stats()
    return (
        f"{speed}\ncontext: {cache.tokens} of {cache.context} tokens | "
        f"cache: {cache.bytes / _MIB:.1f} MiB, {cache.bits_per_value:.2f} bits per value "
        f"(f16: {cache.f16_bytes / _MIB:.1f} MiB, 16 bits)"
    )
