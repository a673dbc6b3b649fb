"""Answers a request in pieces: parses reasoning and tool calls out of what the engine generates."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from polarlm.engine import Chunk, Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.errors import ConstraintError
from polarlm.engine.parsing.answer_parser import AnswerParser, shown_tokens
from polarlm.engine.parsing.channel_parser import ChannelParser, channel_tokens
from polarlm.engine.parsing.pieces import Piece, Progress, fold, keep
from polarlm.engine.requests.prompts import Prompt, is_chat, place_of_answer
from polarlm.engine.requests.request import Ticket
from polarlm.engine.schemas.preparation import prepare_for_text
from polarlm.model_loaders.chat.channels import Channels
from polarlm.model_loaders.errors import LoadError
from polarlm.server.answers.call_grammar import Grammar, channel_grammar, functions_of, refusal_of_calls
from polarlm.server.answers.custom_calls import CustomCalls
from polarlm.server.reading.parameters import ParsedRequest
from polarlm.server.running.driver import Driver


@dataclass(frozen=True)
class _AnswerPlan:
    """How an answer is generated and parsed; without a parser, all that is generated is text."""

    params: SamplingParams
    parser: AnswerParser | ChannelParser | None = None
    is_begun: bool = False  # whether the prompt needs the header of the answer's text


async def answer(driver: Driver, request: ParsedRequest, index: int = 0) -> AsyncGenerator[Piece, None]:
    """Yield answer `index` in pieces. Closing the generator cancels it. Raises what the driver raises. The first piece
    says that the engine has accepted the request, with the ticket's warnings."""
    plan = _AnswerPlan(request.params)
    ticket: Ticket | None = None

    def submit(prompt: Prompt, params: SamplingParams, options: PromptOptions, **more: Any) -> Ticket:
        """Plan and queue the answer in one call in a thread. An error in a constraint names the request's field."""
        nonlocal plan, ticket
        # Each answer has a seed of its own, so that they differ and can be repeated.
        is_seeded = params.seed >= 0 or driver.engine.config.replayable
        seeded_params = replace(params, seed=max(0, params.seed) + index) if is_seeded else params
        constraint_warnings: list[str] = []
        plan = _plan(driver.engine, request, seeded_params, constraint_warnings.append)
        if plan.is_begun and not options.continue_final_message:
            prompt = [*prompt, {"role": "assistant", "content": ""}]
            options = replace(options, continue_final_message=True)
        try:
            ticket = driver.engine.submit(prompt, plan.params, options, **more)
            ticket = replace(ticket, warnings=(*constraint_warnings, *ticket.warnings))
        except ConstraintError as error:
            if request.tools is not None and plan.params.grammar is not params.grammar:
                error = refusal_of_calls(error, str(plan.params.grammar), request.tools)
            error.field = error.field or request.constrained_by
            raise error from None
        return ticket

    stream = driver.stream(
        request.prompt,
        request.params,
        request.options,
        progress=request.progress,
        submit=submit,
        compiles=request.tools is not None,
    )
    custom_calls = CustomCalls(request.tools.custom if request.tools and request.has_custom_calls else ())
    answer_pieces: list[Piece] = []
    ids: list[int] = []
    reasoning_tokens = uncounted = 0  # uncounted: tokens whose text the parser holds back
    is_first = True
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            if chunk.prompt_tokens and not chunk.prefilled:
                yield Piece(is_waiting=True, warnings=chunk.warnings)
                continue
            if chunk.prefilled:
                yield Piece(progress=Progress(chunk.prompt_tokens, chunk.cached_tokens, chunk.prefilled))
                continue
            assert ticket is not None
            if plan.parser is None:
                new_pieces = [_piece(chunk, plan.params.stop)]
            else:
                ids += chunk.token_ids
                new_pieces = list(_parse_chunk(chunk, plan.parser, plan.params.stop))
                answer_pieces += new_pieces
                uncounted += len(chunk.token_ids)
                if any(piece.reasoning for piece in new_pieces):
                    reasoning_tokens += uncounted
                uncounted = 0 if any(map(_says_something, new_pieces)) else uncounted
                if chunk.finish_reason is not None and chunk.stopped_by is None and not plan.parser.is_cut_off:
                    keep(ticket.conversation, fold(answer_pieces), ids)
            for piece in new_pieces:
                piece_to_send = custom_calls.convert(piece)
                if request.reasoning == "dropped":
                    piece_to_send = replace(piece_to_send, reasoning="")
                if piece.usage is not None and reasoning_tokens:
                    own_usage = replace(piece.usage, reasoning_tokens=reasoning_tokens)
                    piece_to_send = replace(piece_to_send, usage=own_usage)
                if is_first:
                    piece_to_send = replace(
                        piece_to_send, prompt_tokens=ticket.prompt_tokens, cached_tokens=ticket.cached_tokens()
                    )
                    is_first = False
                yield piece_to_send


def _plan(engine: Engine, request: ParsedRequest, params: SamplingParams, warn: Callable[[str], None]) -> _AnswerPlan:
    """warn: called with a sentence for each part of a constraint that does not hold."""
    if not is_chat(request.prompt):
        return _AnswerPlan(params)
    template, control = engine.model.template, engine.model.tokenizer.control_tokens()
    schema = _text_schema(request, params, warn)
    if schema is not None:
        params = replace(params, schema=None)  # the grammar of the calls has it
    try:
        if template.channels is not None:
            return _plan_channels(template.channels, engine, request, params, schema, warn)
        place = place_of_answer(request.prompt, engine.model, request.options)
        reasoning = None if place == "after" else template.tags
        format = None if request.tools is None else template.calls
    except LoadError as error:
        raise EngineError(str(error)) from None
    tags = None if request.reasoning == "inline" else reasoning
    if tags is None and format is None:
        return _AnswerPlan(replace(params, shown_tokens=shown_tokens(control, reasoning, None)))
    tokens = shown_tokens(control, reasoning, format)
    names: Mapping[str, Mapping[str, Any]] = {}
    if request.tools is not None and format is not None:
        functions = functions_of(request.tools.callable)
        names = {function.name: function.schema for function in functions}
        if not params.is_constrained and not _goes_on(request):
            initial_tags = reasoning if place == "before" else None  # a constraint begins after open reasoning
            calls, several = request.tools.calls, request.tools.several
            text = Grammar(format, functions, control, calls, several, initial_tags, schema, warn).text()
            params = replace(params, grammar=text)
        if request.tools.calls == "none":
            format = None
    parser = AnswerParser(format, names, control, tags, thinks=tags is not None and place == "inside")
    return _AnswerPlan(replace(params, shown_tokens=tokens), parser)


def _goes_on(request: ParsedRequest) -> bool:
    """Whether an answer that calls nothing goes on after the model's end, where a grammar would end it."""
    return request.tools is not None and request.tools.calls == "none" and request.params.ignore_eos


def _text_schema(request: ParsedRequest, params: SamplingParams, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """The schema of the text of an answer that may call tools instead. Raises ConstraintError."""
    if params.schema is None or request.tools is None or request.tools.calls != "may":
        return None
    try:
        schema = json.loads(params.schema) if isinstance(params.schema, str) else params.schema
        return prepare_for_text(schema, lambda why: warn(f"the constraint holds in part: {why}"))
    except (ValueError, AttributeError, RecursionError) as error:
        refusal = ConstraintError(f"The JSON schema cannot be used: {error}")
        refusal.field = request.constrained_by
        raise refusal from None


def _plan_channels(
    channels: Channels,
    engine: Engine,
    request: ParsedRequest,
    params: SamplingParams,
    schema: dict[str, Any] | None,
    warn: Callable[[str], None],
) -> _AnswerPlan:
    """How an answer of messages in channels is generated and parsed. A constraint applies to the text alone."""
    format, control = engine.model.template.calls, engine.model.tokenizer.control_tokens()
    is_begun = params.is_constrained or request.options.continue_final_message
    names: Sequence[str] = ()
    if request.tools is not None and not is_begun and not _goes_on(request):
        functions = functions_of(request.tools.callable)
        text = channel_grammar(
            channels, format, functions, control, calls=request.tools.calls, schema=schema, warn=warn
        )
        params = replace(params, grammar=text)
        names = [] if request.tools.calls == "none" else [function.name for function in functions]
    parser = ChannelParser(channels, format, names, is_begun=is_begun, inline=request.reasoning == "inline")
    return _AnswerPlan(replace(params, shown_tokens=channel_tokens(channels, control)), parser, is_begun)


def _parse_chunk(chunk: Chunk, parser: AnswerParser | ChannelParser, stops: tuple[str, ...]) -> Iterable[Piece]:
    """The pieces of a chunk. An answer with calls that are all complete ends with "tool_calls"."""
    is_last = chunk.finish_reason is not None
    parts = parser.push(chunk.text)
    if is_last:
        is_cut = chunk.finish_reason == "length" or chunk.stopped_by is not None
        parts += parser.finish(cut=is_cut, next=chunk.stopped_by or "")
    if not parts and (chunk.logprobs or is_last):
        parts = [Piece()]
    if parts:
        parts[0] = replace(parts[0], logprobs=chunk.logprobs)
    if is_last:
        end = _piece(chunk, stops)
        if parser.calls and not parser.is_cut_off and end.finish_reason == "stop":
            end = replace(end, finish_reason="tool_calls", stopped_by=None)
        parts[-1] = replace(parts[-1], finish_reason=end.finish_reason, usage=end.usage, stopped_by=end.stopped_by)
    return parts


def _says_something(piece: Piece) -> bool:
    return bool(piece.reasoning or piece.text or piece.call or piece.arguments)


def _piece(chunk: Chunk, stops: tuple[str, ...]) -> Piece:
    return Piece(
        text=chunk.text,
        logprobs=chunk.logprobs,
        token_ids=chunk.token_ids,
        prompt_ids=chunk.prompt_ids,
        prompt_logprobs=chunk.prompt_logprobs,
        finish_reason=chunk.finish_reason,
        usage=chunk.usage,
        stopped_by=chunk.stopped_by if chunk.stopped_by in stops else None,
    )
