"""OpenAI's endpoints that generate: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine import EngineError, Usage
from server.driver import Driver
from server.http.bodies import read_body
from server.http.errors import api_error
from server.http.shapes import Dialect, Writer
from server.http.streams import Event, EventStream, Pieces, merged, while_there
from server.parameters import Asked, read
from server.pieces import Piece, answer, fold
from server.refused import Refused
from server.values import BadRequest


class Generation:
    """One endpoint: requests in, answers out, whole or as they come."""

    def __init__(self, driver: Driver, dialect: Dialect) -> None:
        self._driver = driver
        self._dialect = dialect

    async def serve(self, request: Request) -> Response:
        """The response. Raises BadRequest, Refused, EngineError, ApiError, or ClientDisconnect."""
        dialect, model = self._dialect, self._driver.engine.model
        body = await read_body(request, self._driver.config.max_body)
        asked = read(
            body,
            self._driver.engine.tokenize,
            (dialect.takes,),
            switched_logprobs=dialect.switched_logprobs,
            parse_special=self._driver.config.parse_special,
        )
        if asked.n > (room := self._driver.room):
            sentence = f"n is {asked.n}, and this server has room for {room} answers, those included that wait"
            raise BadRequest("n", f"{sentence}: ask for fewer at a time (--parallel and --max-queue are its limits)")
        with_logprobs = asked.params.logprobs is not None
        logprobs = [dialect.logprobs(model.tokenizer) for _ in range(asked.n if with_logprobs else 0)]
        hidden = self._driver.config.hide_cached_tokens
        writer = Writer(dialect, model.name, asked.include_usage, logprobs, tells_cached=not hidden)
        if asked.stream:
            events = self._events(asked, writer)
            return EventStream(await while_there(request.receive, anext(events)), events)
        return JSONResponse(await while_there(request.receive, self._whole(asked, writer)))

    def _pieces(self, asked: Asked) -> Pieces:
        return merged([answer(self._driver, asked, index) for index in range(asked.n)])

    async def _whole(self, asked: Asked, writer: Writer) -> dict[str, object]:
        given: list[list[Piece]] = [[] for _ in range(asked.n)]
        async with aclosing(self._pieces(asked)) as pieces:
            async for index, piece in pieces:
                given[index].append(piece)
        return writer.whole([fold(pieces_of_one) for pieces_of_one in given])

    async def _events(self, asked: Asked, writer: Writer) -> AsyncGenerator[Event, None]:
        """The events of a streamed response. An error before the first one is raised; a later one is the last event."""
        begun: set[int] = set()
        sent = False
        usages: list[Usage] = []
        try:
            async with aclosing(self._pieces(asked)) as pieces:
                async for index, piece in pieces:
                    for event in writer.events(index, piece, first=index not in begun):
                        sent = True
                        yield event
                    begun.add(index)
                    if piece.usage is not None:
                        usages.append(piece.usage)
        except (Refused, EngineError) as error:
            if not sent:
                raise
            yield api_error(error).body()
            return
        if asked.include_usage:
            yield writer.usage(usages)
        yield None
