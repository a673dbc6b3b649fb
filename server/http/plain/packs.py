"""/v1/packs: the contexts that requests begin with by a name."""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.server.http.bodies import Endpoints


class Packs(Endpoints):
    def routes(self) -> list[Route]:
        return [Route("/v1/packs", self.all)]

    async def all(self, _request: Request) -> Response:
        """As /v1/models: {"object", "data": [{"id", "object", "tokens", "texts": [{"name", "sha256"}]}]}"""
        packs = [
            {
                "id": pack.name,
                "object": "pack",
                "tokens": len(pack.token_ids),
                "texts": [asdict(text) for text in pack.texts],
            }
            for pack in self._driver.engine.packs.values()
        ]
        return JSONResponse({"object": "list", "data": packs})
