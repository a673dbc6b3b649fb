"""The methods of an engine that return whole answers: its stream, folded."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast, overload

from polarlm.engine.outputs import Chunk, Completion, fold
from polarlm.engine.params import PromptOptions, SamplingParams
from polarlm.engine.parsing.tool_answer import ToolAnswer
from polarlm.engine.requests.prompts import Batch, Messages, Prompt, as_messages, is_batch, is_chat
from polarlm.engine.vectors import Vectors, compute_each

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from polarlm.engine.keywords import GenerateKeywords

Params = SamplingParams | None  # None: the defaults
Options = PromptOptions | None
_STREAM_SETTINGS = ("progress", "constraint")  # settings that are no fields of SamplingParams


class Folding:
    """Makes the completion of a prompt's chunks, which `params` and `settings` are for."""

    def __init__(
        self, engine: Completions, prompt: Prompt, params: Params, options: Options, settings: Mapping[str, Any]
    ) -> None:
        """Raises EngineError."""
        self.params, self.settings = params, settings
        self._tool_answer: ToolAnswer | None = None
        if isinstance(options, PromptOptions) and options.tools and is_chat(prompt):
            stream_settings = {name: value for name, value in settings.items() if name in _STREAM_SETTINGS}
            params_settings = {name: value for name, value in settings.items() if name not in _STREAM_SETTINGS}
            self._tool_answer = ToolAnswer.create(
                prompt, replace(params or SamplingParams(), **params_settings), options, engine.model
            )
            self.params, self.settings = self._tool_answer.params, stream_settings
            self._conversation = partial(
                engine._answers.conversation, engine.begin_with_pack(prompt, options), options.cache_salt
            )
            self._begins = not options.continue_final_message

    def fold(self, chunks: Sequence[Chunk]) -> Completion:
        """The completion, whose ids are kept if it is parsed."""
        if self._tool_answer is None:
            return fold(chunks)
        return self._tool_answer.fold(chunks, self._conversation() if self._begins else None)


class Completions(Vectors):
    stream: Callable[..., Generator[Chunk, None, None]]

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is one prompt, and mypy sees its letters
        self, prompt: Batch, params: Params = None, options: Options = None, **settings: Unpack[GenerateKeywords]
    ) -> list[Completion]: ...

    @overload
    def generate(
        self, prompt: Prompt, params: Params = None, options: Options = None, **settings: Unpack[GenerateKeywords]
    ) -> Completion: ...

    def generate(
        self,
        prompt: Prompt | Batch,
        params: Params = None,
        options: Options = None,
        **settings: Unpack[GenerateKeywords],
    ) -> Completion | list[Completion]:
        """The whole answer: `stream`, folded. Of several prompts, a list of texts, of lists of messages or of lists of
        ids, the answers in their order. These are computed together; an error in one prompt, which the message names,
        is raised before any is computed."""
        if not is_batch(prompt):
            folding = Folding(self, cast(Prompt, prompt), params, options, settings)
            return folding.fold(list(self.stream(prompt, folding.params, options, **folding.settings)))
        prompts = cast(Sequence[Prompt], prompt)
        each = [Folding(self, one, params, options, settings) for one in prompts]
        jobs = [(one, folding.params, options) for one, folding in zip(prompts, each, strict=True)]
        answers = compute_each(self, jobs, **each[0].settings) if each else []
        return [folding.fold(chunks) for folding, chunks in zip(each, answers, strict=True)]

    def chat(
        self, messages: Messages, params: Params = None, options: Options = None, **settings: Unpack[GenerateKeywords]
    ) -> Completion:
        """The answer to a conversation: messages with "role" and "content", or the text of a user's only message.

        An assistant message may carry the "token_ids" that it was generated as, so that the prefix cache finds them;
        recent answers do not need them. With `options.tools` the answer is parsed: see `Completion`.
        """
        return cast(Completion, self.generate(as_messages(messages), params, options, **settings))
