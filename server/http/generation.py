"""The path of every request for an answer, in any API's shapes: from its body to answers, whole or streamed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from polarlm.engine import Usage
from polarlm.engine.parsing.pieces import Answer, Piece, fold
from polarlm.server.answers.answering import answer
from polarlm.server.answers.compaction import answer_compacted
from polarlm.server.http.bodies import Endpoints
from polarlm.server.http.errors import ApiError
from polarlm.server.http.streams import (
    COMMENT,
    DATA,
    Event,
    EventStream,
    Framing,
    Pieces,
    merge,
    while_connected,
)
from polarlm.server.http.warnings import FIELD, add_to_stream, warn
from polarlm.server.reading.edits import EditedPrompt, edit, mark_cleared_results
from polarlm.server.reading.fields import FIELDS, unknown_fields
from polarlm.server.reading.parameters import ModelInfo, ParsedRequest
from polarlm.server.reading.values import BadRequest
from polarlm.server.running import journal
from polarlm.server.running.driver import Driver


class Writer(ABC):
    """Makes the JSON objects of one response. Errors have OpenAI's shape unless a writer has its own."""

    error_body: ClassVar[Callable[[ApiError], dict[str, Any]]] = ApiError.body
    edited: EditedPrompt | None = None  # the prompt after the request's edits; set before the first piece

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> Any:
        """The body of a response that is not streamed: a JSON value."""

    @abstractmethod
    def events(self, index: int, piece: Piece, *, first: bool) -> Iterable[Event]:
        """The events of a piece of answer `index`. first: whether it is the answer's first piece."""

    def ending(self, usages: Sequence[Usage]) -> Iterable[Event]:
        """The events after the end of the last answer; usages: one for each answer."""
        return ()

    def failure(self, error: ApiError) -> Event:
        """The last event of a stream that an error ends."""
        return type(self).error_body(error)


class Endpoint(ABC):
    framing: Framing = DATA  # how the events of a streamed answer are written
    known: Collection[str] = FIELDS  # fields that are read, or have no effect by intent; all others get a warning

    @abstractmethod
    def read(self, body: dict[str, Any], info: ModelInfo) -> tuple[ParsedRequest, Writer]:
        """The request in the body of an HTTP request. Raises BadRequest."""

    def warnings(self, body: Mapping[str, Any]) -> list[str]:
        """Sentences about fields of a validated body that have no effect, although the client may expect one."""
        return unknown_fields(body, self.known)


class Generation(Endpoints):
    def __init__(self, driver: Driver, endpoint: Endpoint, count_fields: Mapping[str, Any] | None = None) -> None:
        """count_fields: fields of a count of tokens besides it."""
        super().__init__(driver)
        self._endpoint = endpoint
        self._count_fields = count_fields or {}

    async def serve(self, raw_request: Request) -> Response:
        """The response. Raises BadRequest, Refusal, EngineError, ApiError, or ClientDisconnect."""
        return await self.respond(raw_request, await self._body(raw_request))

    async def count(self, raw_request: Request) -> Response:
        """{…, "input_tokens"}, after edits, which leave the count before them in "context_management". Raises
        BadRequest, Refusal, EngineError or ApiError."""
        request, _ = await self._parse(await self._body(raw_request))
        sentences, engine = request.sentences, self._driver.engine

        def count() -> dict[str, Any]:
            def size(prompt: Any) -> int:
                return len(engine.prompt_ids(prompt, request.options, sentences.append))

            if not request.edits:
                return {"input_tokens": size(request.prompt)}
            edited = edit(request.prompt, request.edits, size)  # type: ignore[arg-type]
            tokens = size(edited.prompt)
            original = {"original_input_tokens": tokens + sum(cleared for _, _, cleared in edited.cleared)}
            return {"input_tokens": tokens, "context_management": original}

        counts = await self._run_counted(raw_request, "tokenized", count, request.prompt)
        return warn(JSONResponse({**self._count_fields, **counts}), sentences)

    async def _edit(self, raw_request: Request, request: ParsedRequest, writer: Writer) -> ParsedRequest:
        """The request with its edits done, but for a compaction, which the answer begins with. Raises ClientDisconnect,
        Refusal or EngineError."""
        if not request.edits:
            return request
        engine, options = self._driver.engine, request.options
        prompt: Any = request.prompt
        is_in_place = self._driver.config.context_edits == "in-place" if request.in_place is None else request.in_place
        why = "" if engine.can_leave_out else "this model, or this server's settings, cannot leave blocks out"

        def size(messages: Any) -> int:
            return len(engine.prompt_ids(messages, options))

        def work() -> tuple[EditedPrompt, str]:
            edited = edit(prompt, request.edits, size)
            if not is_in_place or why or not edited.cleared:
                return edited, why
            marked = mark_cleared_results(prompt, edited.prompt)
            fits = size(marked) < engine.context
            return (replace(edited, prompt=marked) if fits else edited), "" if fits else "its positions do not fit"

        edited, reason = await self._run_counted(raw_request, "tokenized", work, request.prompt)
        writer.edited = edited
        warnings = request.warnings
        if is_in_place and edited.cleared and reason:
            warnings = (*warnings, ("", f"the prompt is read again behind what was cleared: {reason}"))
        compaction = edited.compaction or request.compaction
        return replace(request, prompt=edited.prompt, edits=(), compaction=compaction, warnings=warnings)

    async def _parse(self, body: dict[str, Any]) -> tuple[ParsedRequest, Writer]:
        """The request in a body, and what writes its response. Raises BadRequest or Refusal."""
        return await asyncio.to_thread(self._read, body) if self._driver.engine.reads_images else self._read(body)

    def _read(self, body: dict[str, Any]) -> tuple[ParsedRequest, Writer]:
        info = self._driver.info_for(body)
        request, writer = self._endpoint.read(body, info)
        progress = request.progress and request.stream and info.tells_cached
        others = (("", sentence) for sentence in self._endpoint.warnings(body))
        return replace(request, progress=progress, warnings=(*request.warnings, *others)), writer

    async def respond(self, raw_request: Request, body: dict[str, Any]) -> Response:
        journal.read_tier_and_slot(body)
        request, writer = await self._parse(body)
        _check_room(request, self._driver.room)
        request = await self._edit(raw_request, request, writer)
        if request.stream:
            return await self._stream(request, writer, raw_request.receive)
        return await while_connected(raw_request.receive, self._whole(request, writer))

    def _pieces(self, request: ParsedRequest) -> Pieces:
        answers = ((one, index) for one in request.each() for index in range(request.n))
        begin = answer if request.compaction is None else answer_compacted
        return merge([begin(self._driver, one, index) for one, index in answers])

    async def _whole(self, request: ParsedRequest, writer: Writer) -> Response:
        each: list[list[Piece]] = [[] for _ in range(request.answers)]
        sentences = request.sentences
        async with aclosing(self._pieces(request)) as pieces:
            async for index, piece in pieces:
                sentences += piece.warnings
                each[index].append(piece)
        # In a thread, since an answer may be long.
        response = await asyncio.to_thread(
            lambda: JSONResponse(writer.whole([fold(pieces_of_one) for pieces_of_one in each]))
        )
        return warn(response, sentences)

    async def _stream(self, request: ParsedRequest, writer: Writer, receive: Receive) -> Response:
        events, framing = self._events(request, writer), self._endpoint.framing
        first = await while_connected(receive, anext(events))
        stream = EventStream(events, framing, writer.failure, partial(_sign_of_life, writer, framing))
        stream.silent_seconds = request.sign_seconds if request.sign_seconds is not None else stream.silent_seconds
        return warn(stream, (first or {})[FIELD])

    async def _events(self, request: ParsedRequest, writer: Writer) -> AsyncGenerator[Event, None]:
        """The events of a streamed response, behind one with the sentences about what is not done as the request asks,
        which comes once the engine has taken all answers, or one has begun."""
        begun_answers: set[int] = set()
        unaccepted, sentences, is_told = request.answers, request.sentences, False
        usages: dict[int, Usage] = {}
        last: list[Event] = []  # the events of the last piece
        async with aclosing(self._pieces(request)) as pieces:
            async for index, piece in pieces:
                sentences += piece.warnings
                unaccepted -= piece.is_waiting
                if not is_told and not (unaccepted and piece.is_waiting):
                    is_told = True
                    yield {FIELD: [*sentences]}
                if piece.is_waiting:
                    continue
                events = writer.events(index, piece, first=index not in begun_answers)
                if piece.prompt_logprobs:  # a long prompt has many
                    events = await asyncio.to_thread(list, events)
                begun_answers.add(index)
                if piece.usage is not None:
                    usages[index] = piece.usage
                if len(usages) == request.answers:
                    last = [*events]
                    continue
                for event in events:
                    yield event
        ending = writer.ending([usages[index] for index in range(request.answers)])
        for event in add_to_stream([*last, *ending], sentences):
            yield event


def _check_room(request: ParsedRequest, room: int) -> None:
    """Raises BadRequest for more answers than there can be."""
    if request.answers > room:
        field = "prompt" if request.more_prompts else "n"
        what = f"{field} asks for {request.answers} answers" if request.more_prompts else f"n is {request.n}"
        sentence = f"{what}, and this server has room for {room} answers, those included that wait"
        raise BadRequest(field, f"{sentence}: ask for fewer at a time (--parallel and --max-queue are its limits)")


def _sign_of_life(writer: Writer, framing: Framing) -> bytes:
    """What says in a stream that the next piece is still waited for."""
    return b"".join(map(framing.frame, writer.events(0, Piece(is_waiting=True), first=False))) or COMMENT
