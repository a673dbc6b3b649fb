"""/sessions: saves and loads a conversation's part of the KV store by name; /v1/packs: lists the contexts that requests
begin with by a name."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.server.http.bodies import Endpoints
from polarlm.server.http.streams import while_connected
from polarlm.server.http.warnings import warn
from polarlm.server.reading.fields import FIELDS, unknown_fields
from polarlm.server.reading.prompts import read_prompt, read_salt
from polarlm.server.reading.values import FieldWarnings
from polarlm.server.running.sessions import read_name, read_options_to_save


class Sessions(Endpoints):
    """Those of sessions answer 501 if the server has no folder for them."""

    def routes(self) -> list[Route]:
        return [
            Route("/sessions", self.all),
            Route("/sessions/save", self.save, methods=["POST"]),
            Route("/sessions/load", self.load, methods=["POST"]),
            Route("/sessions/{name}", self.remove, methods=["DELETE"]),
            Route("/v1/packs", self.packs),
        ]

    async def all(self, _request: Request) -> Response:
        """{"sessions": [{"name", "bytes", "seconds"}]}; seconds since 1970"""
        sessions = await self._driver.run_on_disk("listed", self._driver.session_folder.all)
        return JSONResponse({"sessions": [asdict(session) for session in sessions]})

    async def save(self, request: Request) -> Response:
        """{"name", "messages" or "prompt"} → {"name", "tokens"}: how many tokens of the prompt are in the store."""
        body = await self._body(request)
        name = read_name("name", body.get("name"))
        options = read_options_to_save(body, self._driver.info_for(body))
        field_warnings = FieldWarnings()
        prompt = read_prompt(body, field_warnings=field_warnings, reads_images=self._driver.engine.reads_images)
        tokens = await while_connected(request.receive, self._driver.save_session(name, prompt, options))
        warnings = [*(sentence for _, sentence in field_warnings), *unknown_fields(body, ("name", *FIELDS))]
        return warn(self._transfer_response(name, tokens), warnings)

    async def load(self, request: Request) -> Response:
        """{"name"} → {"name", "tokens"}. "cache_salt" is the one it was saved with; only prompts with it find it."""
        body = await self._body(request)
        name, salt = read_name("name", body.get("name")), read_salt(body.get("cache_salt"))
        response = self._transfer_response(name, await self._driver.load_session(name, salt))
        return warn(response, unknown_fields(body, ("name", "cache_salt")))

    def _transfer_response(self, name: str, tokens: int) -> Response:
        count_fields = {} if self._driver.config.hide_cached_tokens else {"tokens": tokens}
        return JSONResponse({"name": name, **count_fields})

    async def remove(self, request: Request) -> Response:
        name = read_name("name", request.path_params["name"])
        await self._driver.run_on_disk("removed", partial(self._driver.session_folder.remove, name))
        return Response(status_code=204)

    async def packs(self, _request: Request) -> Response:
        """As /v1/models: {"object", "data": [{"id", "object", "tokens", "texts": [{"name", "sha256"}]}]}"""
        packs = [
            {"id": one.name, "object": "pack", "tokens": len(one.token_ids), "texts": [*map(asdict, one.texts)]}
            for one in self._driver.engine.packs.values()
        ]
        return JSONResponse({"object": "list", "data": packs})
