"""Answers a request whose conversation is compacted first: the model writes a summary, on the prompt in the cache."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from polarlm.engine import EngineError
from polarlm.engine.parsing.pieces import Piece, Summary, fold
from polarlm.server.answers.answering import answer
from polarlm.server.reading.edits import Compaction, compact
from polarlm.server.reading.parameters import ParsedRequest
from polarlm.server.running.driver import Driver

_MOST = 2048  # tokens of a summary, and at most a quarter of the context


async def answer_compacted(driver: Driver, request: ParsedRequest, index: int = 0) -> AsyncGenerator[Piece, None]:
    """As `answer`: a piece with the summary, whose finish_reason is "compaction" where no answer follows, then the
    answer to the compacted conversation. Raises what the driver raises."""
    compaction = request.compaction
    assert compaction is not None
    pieces: list[Piece] = []
    async with aclosing(answer(driver, _summary_request(request, compaction, driver.engine.context), index)) as stream:
        async for piece in stream:
            if piece.is_waiting:
                yield piece
            else:
                pieces.append(piece)
    written = fold(pieces)
    text = written.text.strip()
    if not text and not compaction.goes_on:
        raise EngineError("The model wrote no summary, so that the conversation stays as it is: ask for it again")
    if not text:
        yield Piece(is_waiting=True, warnings=("the conversation is not compacted: the model wrote no summary",))
        request = replace(request, compaction=None)
    else:
        summary = Summary(text, written.usage)
        if written.finish_reason == "length":
            sentence = f"the summary is cut off after {written.usage.completion_tokens} tokens"
            yield Piece(is_waiting=True, warnings=(sentence,))
        if not compaction.goes_on:
            yield Piece(summary=summary, finish_reason="compaction", usage=written.usage)
            return
        yield Piece(summary=summary)
        options = replace(request.options, continue_final_message=False)
        prompt = compact(request.prompt, text)  # type: ignore[arg-type]
        request = replace(request, prompt=prompt, options=options, compaction=None)
    async with aclosing(answer(driver, request, index)) as stream:
        async for piece in stream:
            yield piece


def _summary_request(request: ParsedRequest, compaction: Compaction, context: int) -> ParsedRequest:
    """The request for a summary: the prompt as it is, tools included, and the instruction. It calls no tool, and its
    reasoning ends at once."""
    most, own = min(_MOST, context // 4), request.params.max_tokens
    if not compaction.goes_on and own is not None and own >= 0:
        most = min(most, own)
    params = replace(
        request.params,
        max_tokens=most,
        stop=(),
        schema=None,
        grammar=None,
        regex=None,
        logprobs=None,
        reasoning_budget=0,
    )
    return replace(
        request,
        prompt=[*request.prompt, {"role": "user", "content": compaction.instruction}],
        options=replace(request.options, continue_final_message=False),
        params=params,
        tools=request.tools and replace(request.tools, calls="none"),
        progress=False,
        constrained_by=None,
        reasoning="dropped",
        compaction=None,
    )
