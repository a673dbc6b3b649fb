"""How the answer to messages is parsed: one with tools as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polarlm.engine.errors import EngineError, shown
from polarlm.engine.outputs import Chunk, Completion, fold
from polarlm.engine.params import PromptOptions, SamplingParams
from polarlm.engine.parsing import pieces
from polarlm.engine.parsing.answer_parser import AnswerParser, shown_tokens
from polarlm.engine.parsing.channel_parser import ChannelParser, channel_tokens
from polarlm.engine.parsing.pieces import Piece
from polarlm.engine.requests.answers import Conversation
from polarlm.engine.requests.prompts import place_of_answer
from polarlm.model_loaders import Model
from polarlm.model_loaders.errors import LoadError


@dataclass(frozen=True)
class ToolAnswer:
    """params: with the control tokens that the parser needs to see."""

    params: SamplingParams
    _parser: AnswerParser | ChannelParser

    @classmethod
    def create(
        cls, prompt: Sequence[Mapping[str, Any]], params: SamplingParams, options: PromptOptions, model: Model
    ) -> ToolAnswer:
        """The answer to messages, of which nothing is parsed yet. Raises EngineError."""
        parser, tokens = parser_of(prompt, options, model)
        return cls(replace(params, shown_tokens=(*params.shown_tokens, *tokens)), parser)

    def fold(self, chunks: Sequence[Chunk], conversation: Conversation | None = None) -> Completion:
        """The completion that consists of `chunks`. conversation: keeps the ids of the answer."""
        whole, last = fold(chunks), chunks[-1]
        assert last.usage is not None
        cut = last.finish_reason == "length" or last.stopped_by is not None
        parts = [*self._parser.push(whole.text), *self._parser.finish(cut=cut, next=last.stopped_by or "")]
        answer = pieces.fold([*parts, Piece(finish_reason=whole.finish_reason, usage=last.usage)])
        is_whole = not self._parser.is_cut_off and whole.finish_reason == "stop"
        if is_whole and last.stopped_by is None:
            pieces.keep(conversation, answer, whole.token_ids)
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
