"""/sessions: what the store holds of a conversation, saved and loaded by name."""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.driver import Driver
from server.http.bodies import read_body
from server.parameters import read_prompt
from server.sessions import read_name


class Sessions:
    """Four endpoints, which answer 501 where the server has no folder for sessions."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def routes(self) -> list[Route]:
        return [
            Route("/sessions", self.all),
            Route("/sessions/save", self.save, methods=["POST"]),
            Route("/sessions/load", self.load, methods=["POST"]),
            Route("/sessions/{name}", self.remove, methods=["DELETE"]),
        ]

    async def all(self, _request: Request) -> Response:
        """{"sessions": [{"name", "bytes", "seconds"}]}, seconds since 1970"""
        return JSONResponse({"sessions": [asdict(saved) for saved in await self._driver.list_sessions()]})

    async def save(self, request: Request) -> Response:
        """{"name", "messages" or "prompt"} → {"name", "tokens"}: how many of the prompt's were in the store."""
        body = await read_body(request, self._driver.config.max_body)
        name = read_name("name", body.get("name"))
        return JSONResponse({"name": name, "tokens": await self._driver.save_session(name, read_prompt(body))})

    async def load(self, request: Request) -> Response:
        """{"name"} → {"name", "tokens"}"""
        name = read_name("name", (await read_body(request, self._driver.config.max_body)).get("name"))
        return JSONResponse({"name": name, "tokens": await self._driver.load_session(name)})

    async def remove(self, request: Request) -> Response:
        await self._driver.remove_session(read_name("name", request.path_params["name"]))
        return Response(status_code=204)
