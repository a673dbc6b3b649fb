"""/conversations: the chat page's conversations, kept on the server and shared by all of a user's browsers."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.engine.config import parse_size
from polarlm.server.config import ServerConfig
from polarlm.server.http.bodies import LARGER, read_body
from polarlm.server.http.errors import ApiError
from polarlm.server.http.guard import is_here
from polarlm.server.reading.values import LARGEST, BadRequest, count, mapping
from polarlm.server.running.conversations import ConversationStore

_ID = re.compile(r"[0-9a-f]{16}")


class Conversations:
    """Three endpoints. Without a key, only browsers on this machine may use them; the page checks what it gets."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        folder, most = config.conversations, parse_size(config.max_conversations_size)
        self._store = None if folder is None else ConversationStore(folder, most)

    def routes(self) -> list[Route]:
        return [
            Route("/conversations", self.changes),
            Route("/conversations/{id}", self.write, methods=["POST"]),
            Route("/conversations/{id}", self.remove, methods=["DELETE"]),
        ]

    async def changes(self, request: Request) -> Response:
        """/conversations?since=N: {"kept", "conversations": {ID: {"head", "messages": {ID: …}}}, "revision", "more"}

        The conversations that changed after revision N, with what changed; a deleted conversation has the head null.
        {"kept": false} if no conversations of this client are kept here.
        """
        if self._store is None or not self._is_allowed(request):
            return JSONResponse({"kept": False})
        store = self._store
        revision_text = request.query_params.get("since", "0")
        if re.fullmatch("[0-9]{1,15}", revision_text) is None:
            raise BadRequest("since", "since must be a revision: a whole number")
        changes, revision, more = await asyncio.to_thread(store.changes_since, int(revision_text))
        return JSONResponse({"kept": True, "revision": revision, "more": more, "conversations": changes})

    async def write(self, request: Request) -> Response:
        """{"base", "head", "messages": {ID: …}} → {"revision"}; 409 if the conversation has changed after `base`."""
        store, name = self._authorize(request)
        body = await read_body(request, LARGER * self._config.max_body)
        base = count("base", body.get("base", 0), 0, LARGEST)
        head, messages = mapping("head", body.get("head")), mapping("messages", body.get("messages"))
        for key, message in messages.items():
            if _ID.fullmatch(key) is None:
                raise BadRequest("messages", "messages must have ids of 16 hexadecimal digits")
            mapping(f"messages.{key}", message)
        bodies = {key: _to_json(f"messages.{key}", message) for key, message in messages.items()}
        revision = await asyncio.to_thread(store.write, name, base, _to_json("head", head), bodies)
        if revision is None:
            sentence = (
                f"The conversation has changed after revision {base}: read what is new, and send the change again"
            )
            raise ApiError(409, sentence, "conflict", "base")
        return JSONResponse({"revision": revision})

    async def remove(self, request: Request) -> Response:
        store, name = self._authorize(request)
        return JSONResponse({"revision": await asyncio.to_thread(store.remove, name)})

    def _authorize(self, request: Request) -> tuple[ConversationStore, str]:
        """(the store, a conversation's id). Raises BadRequest for another name, and ApiError without a store, and for a
        client on another machine if there is no key."""
        if self._store is None:
            raise ApiError(501, "This server keeps no conversations: start it with --conversations", "not_supported")
        if not self._is_allowed(request):
            sentence = "This server keeps conversations for this machine's browsers alone: start it with an API key"
            raise ApiError(403, sentence, "not_allowed")
        name = str(request.path_params["id"])
        if _ID.fullmatch(name) is None:
            raise BadRequest("id", "a conversation's id has 16 hexadecimal digits")
        return self._store, name

    def _is_allowed(self, request: Request) -> bool:
        return self._config.keys.are_required or is_here(request.client)


def _to_json(name: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise BadRequest(name, f"{name} holds a number that JSON does not have, such as NaN") from None
