"""Access control of the API, before the body of a request is read."""

from __future__ import annotations

import re
from pathlib import Path

from starlette.datastructures import Address, Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from polarlm.server.config import ServerConfig, literal_address
from polarlm.server.http.errors import CLOSE, ApiError, ErrorShapes
from polarlm.server.running import journal
from polarlm.server.running.listening import HEALTH_PATHS

_OPEN = {*HEALTH_PATHS, "/"}  # paths that need no key; the page asks its user for it
_BROWSERS = {"origin", "referer", "sec-fetch-site", "sec-fetch-mode"}  # headers that only browsers send
_TYPES = {"/documents/text": "application/pdf"}  # of bodies that are no JSON
_FORMER = {  # paths that have been removed, without /v1 → what to do instead; their bodies may be no JSON
    **dict.fromkeys(
        ("files", "batches"),
        "This server keeps no files of requests: polarlm batch FILE --url URL sends it the lines of one",
    ),
    "blocks": "Servers share blocks by a folder or an object store that each names with --kv-store",
    "encoding": "Engines share blocks by --kv-store, and scales by a pack that they have in common",
}
_UNTYPED = "/api/"  # Ollama's clients send JSON there without a Content-Type


def is_here(client: Address | None) -> bool:
    address = None if client is None else literal_address(client.host)
    return address is not None and address.is_loopback


def _is_browser(headers: Headers) -> bool:
    """Whether a page sends a request. No script can leave out what browsers send."""
    return bool(_BROWSERS & set(headers.keys()))


def adapters_folder(request: Request, config: ServerConfig) -> Path:
    """The folder that adapters are loaded from, if the client may change them. Raises ApiError."""
    if config.adapters_folder is None:
        sentence = "This server changes no adapters: start it with --adapters-folder, which a server of one model takes"
        raise ApiError(403, sentence, "not_allowed")
    if _is_browser(request.headers):
        raise ApiError(403, "Web pages cannot change adapters, of whatever origin", "not_allowed", "Origin")
    return Path(config.adapters_folder).expanduser().resolve()


class Guard:
    """ASGI middleware that checks Host, API key, Content-Type, and how the body is framed. Slashes in a row are one.

    A web page of another origin cannot use the API. Its browser asks before it sends JSON, and only --cors-origin
    permits that. If an attacker's name resolves to this machine (DNS rebinding), Host has that name. With an API key,
    Host may have any name: such a page does not know the key.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, errors: ErrorShapes | None = None) -> None:
        self._app = app
        self._errors = errors or ErrorShapes({})
        self._host = _normalize_host(config.host)
        self._names = {"localhost", self._host, *map(_normalize_host, config.allowed_host)}
        self._keys = config.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None
        if scope["type"] == "http":
            scope["path"] = re.sub("//+", "/", scope["path"])  # a base URL that ends with a slash gives two
            scope["raw_path"] = re.sub(b"//+", b"/", scope.get("raw_path") or b"")
            error = self._refusal(scope)
        app = self._app if error is None else self._errors.response(scope["path"], error)
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may have honoured the other header (request smuggling).
            sentence = "A request has either Content-Length or Transfer-Encoding, not both"
            return ApiError(400, sentence, "invalid_http", headers=CLOSE)
        if not self._keys.are_required and not self._is_ours(headers.getlist("host"), scope.get("server")):
            sentence = (
                "This server does not go by the name in the Host header: start it with --allowed-host NAME to give it "
                "this name, or with an API key to let clients call it by any"
            )
            return ApiError(421, sentence, "misdirected_request", "Host")
        keys_sent = _keys(headers)
        if self._keys.are_required and not self._knows_one(keys_sent) and scope["path"] not in _OPEN:
            sentence = "This server needs its API key, as in 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
            if any(keys_sent):
                sentence = "The key is not known: this server has another API key, or this one was withdrawn"
            return ApiError(401, sentence, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if former := _FORMER.get(scope["path"].removeprefix("/v1").lstrip("/").partition("/")[0]):
            return ApiError(410, former, "gone", headers=CLOSE)
        may_lack_type = scope["path"].startswith(_UNTYPED) and not _is_browser(headers)
        media_type = _TYPES.get(scope["path"], "application/json")
        if scope["method"] == "POST" and not _has_type(media_type, headers.getlist("content-type"), may_lack_type):
            return ApiError(415, f"Content-Type must be {media_type}", "unsupported_media_type", "Content-Type")
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            sentence = "This server takes no compressed requests: send the body as it is, without Content-Encoding"
            return ApiError(415, sentence, "unsupported_media_type", "Content-Encoding")
        return None

    def _is_ours(self, hosts: list[str], server: tuple[str, int | None] | None) -> bool:
        """Whether Host names this server: a loopback name, --host, an --allowed-host, or the address it was reached at.

        If --host is every address, any literal address is valid: with a forwarded port the server cannot know its
        address, and an attacker needs a name.
        """
        name = _host_of(hosts[0]) if len(hosts) == 1 else ""
        if name in self._names or (server is not None and name == _normalize_host(server[0])):
            return True
        address, bind_address = literal_address(name), literal_address(self._host)
        return address is not None and (
            address.is_loopback or (bind_address is not None and bind_address.is_unspecified)
        )

    def _knows_one(self, keys_sent: list[str]) -> bool:
        name = next((name for key in keys_sent if (name := self._keys.name_of(key)) is not None), None)
        if name and (entry := journal.current()):
            entry.key = name
        return name is not None


def _keys(headers: Headers) -> list[str]:
    """The keys in a request: a bearer token, and the header of Anthropic's clients, which may send both."""
    authorization, api_keys = headers.getlist("authorization"), headers.getlist("x-api-key")
    scheme, _, key = (authorization[0] if len(authorization) == 1 else "").partition(" ")
    keys_sent = [key.strip()] if scheme.lower() == "bearer" else []
    return [*keys_sent, *(api_keys if len(api_keys) == 1 else [])]


def _has_type(media_type: str, content_types: list[str], may_be_missing: bool) -> bool:
    if not content_types:
        return may_be_missing
    return len(content_types) == 1 and content_types[0].partition(";")[0].strip().lower() == media_type


def _host_of(host: str) -> str:
    """The name or address in a Host header, `[::1]:8080` as `::1`; empty for anything else."""
    parts = re.fullmatch(r"(\[[^\[\]]*\]|[^\[\]:]*)(?::[0-9]*)?", host)
    return "" if parts is None else _normalize_host(parts[1])


def _normalize_host(host: str) -> str:
    return host.removeprefix("[").removesuffix("]").removesuffix(".").lower()
