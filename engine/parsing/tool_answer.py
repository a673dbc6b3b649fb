"""How the answer to messages is parsed, and a completion made of one with tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polarlm.engine.errors import EngineError, shown
from polarlm.engine.outputs import Chunk, Completion, fold
from polarlm.engine.params import PromptOptions, SamplingParams
from polarlm.engine.parsing import pieces
from polarlm.engine.parsing.answer_parser import AnswerParser, shown_tokens
from polarlm.engine.parsing.channel_parser import ChannelParser, channel_tokens
from polarlm.engine.parsing.pieces import Piece
from polarlm.engine.requests.prompts import Prompt, is_chat, place_of_answer
from polarlm.model_loaders import Model
from polarlm.model_loaders.errors import LoadError

_STREAM_SETTINGS = ("progress", "constraint")  # settings that are no fields of SamplingParams


class Folding:
    """Makes the completion of a prompt's chunks, which `params` and `settings` are for. An answer to messages with
    tools is parsed."""

    def __init__(
        self,
        engine: Any,
        prompt: Prompt,
        params: SamplingParams | None,
        options: PromptOptions | None,
        settings: Mapping[str, Any],
    ) -> None:
        """engine: an Engine. Raises EngineError."""
        self.params, self.settings = params, settings
        self._parser: AnswerParser | ChannelParser | None = None
        if isinstance(options, PromptOptions) and options.tools and is_chat(prompt):
            self.settings = {name: value for name, value in settings.items() if name in _STREAM_SETTINGS}
            others = {name: value for name, value in settings.items() if name not in _STREAM_SETTINGS}
            self._parser, tokens = parser_of(prompt, options, engine.model)
            params = replace(params or SamplingParams(), **others)
            self.params = replace(params, shown_tokens=(*params.shown_tokens, *tokens))
            follows = engine.begin_with_pack(prompt, options), options.cache_salt
            is_begun = options.continue_final_message
            self._conversation = lambda: None if is_begun else engine._answers.conversation(*follows)

    def fold(self, chunks: Sequence[Chunk]) -> Completion:
        """The completion, whose ids are kept if it is parsed."""
        whole, last = fold(chunks), chunks[-1]
        if self._parser is None:
            return whole
        cut = last.finish_reason == "length" or last.stopped_by is not None
        parts = [*self._parser.push(whole.text), *self._parser.finish(cut=cut, next=last.stopped_by or "")]
        answer = pieces.fold([*parts, Piece(finish_reason=whole.finish_reason, usage=whole.usage)])
        is_whole = not self._parser.is_cut_off and whole.finish_reason == "stop"
        if is_whole and last.stopped_by is None:
            pieces.keep(self._conversation(), answer, whole.token_ids)
        calls = tuple(call.to_json() for call in answer.calls)
        reason = "tool_calls" if calls and is_whole else whole.finish_reason
        return replace(whole, text=answer.text, reasoning=answer.reasoning, tool_calls=calls, finish_reason=reason)


def parser_of(
    prompt: Sequence[Mapping[str, Any]], options: PromptOptions, model: Model
) -> tuple[AnswerParser | ChannelParser, tuple[int, ...]]:
    """The parser of an answer to messages, and the control tokens that it has to see. Raises EngineError."""
    template, control = model.template, model.tokenizer.control_tokens()
    names = {_name(tool): tool["function"].get("parameters") for tool in options.tools}
    try:
        if template.channels is not None:
            is_begun, tokens = options.continue_final_message, channel_tokens(template.channels, control)
            parser = ChannelParser(template.channels, template.calls, names, is_begun=is_begun, inline=False)
            return parser, tokens
        place = place_of_answer(prompt, model, options)
        tags = None if place == "after" else template.tags
        format = template.calls if options.tools else None
        return AnswerParser(format, names, control, tags, thinks=place == "inside"), shown_tokens(control, tags, format)
    except LoadError as error:
        raise EngineError(str(error)) from None


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise EngineError(f'tools: a function is {{"type": "function", "function": {{"name": …}}}}, not {shown(tool)}')
    return name
