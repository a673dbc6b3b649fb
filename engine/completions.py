"""The methods of an engine that return whole answers: its stream, folded."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, cast, overload

from polarlm.engine.outputs import Chunk, Completion, fold
from polarlm.engine.params import PromptOptions, SamplingParams
from polarlm.engine.requests.prompts import Batch, Messages, Prompt, as_messages, is_batch
from polarlm.engine.vectors import Vectors, compute_each

Params = SamplingParams | None  # None: the defaults
Options = PromptOptions | None


class Completions(Vectors):
    stream: Callable[..., Generator[Chunk, None, None]]

    @overload
    def generate(
        self, prompt: Batch, params: Params = None, options: Options = None, **settings: Any
    ) -> list[Completion]: ...

    @overload
    def generate(
        self, prompt: Prompt, params: Params = None, options: Options = None, **settings: Any
    ) -> Completion: ...

    def generate(
        self, prompt: Prompt | Batch, params: Params = None, options: Options = None, **settings: Any
    ) -> Completion | list[Completion]:
        """The whole answer: `stream`, folded. Of several prompts, a list of texts, of lists of messages or of lists of
        ids, the answers in their order. These are computed together; an error in one prompt, which the message names,
        is raised before any is computed."""
        if not is_batch(prompt):
            return fold(self.stream(cast(Prompt, prompt), params, options, **settings))
        return [fold(chunks) for chunks in compute_each(self, [(one, params, options) for one in prompt], **settings)]

    def chat(self, messages: Messages, params: Params = None, options: Options = None, **settings: Any) -> Completion:
        """The answer to a conversation: messages with "role" and "content", or the text of a user's only message.

        An assistant message may carry the "token_ids" that it was generated as, so that the prefix cache finds them;
        recent answers do not need them.
        """
        return fold(self.stream(as_messages(messages), params, options, **settings))
