"""Objects in an HTTP store: another `polarlm serve`, or any server that answers GET, HEAD and PUT of /blocks/NAME."""

from __future__ import annotations

import http.client
import re
import ssl
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import numpy as np

from polarlm.model_loaders.recent import Recent

_SECONDS = 2.0  # the timeout of a connection, and of each piece of a response
_ATTEMPTS = 3  # to read an object: after a connection breaks, reading resumes where it broke
_IDLE = 4  # most connections that are kept open
_PIECE = 1 << 20  # bytes
_MISSING = 404, 410
_PRESENT_SECONDS = 60.0  # for which a positive lookup stays cached
_MOST_PRESENT = 1 << 16  # positive lookups that are cached


class BlockServer:
    """The server at a URL. key: its API key; None for none. Raises ValueError for a URL that is not one of HTTP."""

    def __init__(self, url: str, key: str | None = None):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("it is not a URL such as http://host:8080")
        if parts.username is not None:
            raise ValueError("it must not contain a user or a password")
        self.path = parts.path.rstrip("/")
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._host, self._port = parts.hostname, parts.port
        self._context = ssl.create_default_context() if parts.scheme == "https" else None

    def connection(self, timeout: float) -> http.client.HTTPConnection:
        """Return a new connection, which is not open yet."""
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._context)


class RemoteTier:
    """Objects below `url`, each of at most `limit` bytes. key: as for `BlockServer`, which may raise ValueError."""

    label = "remote"
    contents = None

    def __init__(self, url: str, limit: int, key: str | None = None):
        self.place = f"remote ({url})"
        self._server, self._limit = BlockServer(url, key), limit
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._damaged: set[bytes] = set()  # objects that the next write replaces
        # Positive lookups and their times: a turn asks for all blocks before it.
        self._present: Recent[bytes, float] = Recent(_MOST_PRESENT)

    def has(self, name: bytes) -> bool:
        if name in self._damaged:
            return False
        if time.monotonic() - (self._present.get(name) or -_PRESENT_SECONDS) < _PRESENT_SECONDS:
            return True
        is_there = self._ask("HEAD", name)[0] == 200
        self._note(name, is_there)
        return is_there

    def _note(self, name: bytes, is_there: bool) -> None:
        if is_there:
            self._present.put(name, time.monotonic())
        else:
            self._present.drop(name)

    def read(self, name: bytes) -> memoryview | None:
        content = np.empty(0, np.uint8)
        for attempt in range(_ATTEMPTS):
            try:
                status, whole, piece = self._ask("GET", name, start=len(content))
            except ConnectionError:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            if status in _MISSING:
                self._note(name, False)
                return None
            content = piece if status == 200 or not len(content) else np.concatenate((content, piece))
            if len(content) >= whole:
                self._note(name, True)
                return content.data
        raise ConnectionError("the response was cut short in every attempt")

    def write(self, name: bytes, header: bytes, payload: memoryview) -> None:
        self._ask("PUT", name, body=b"".join((header, payload)))
        self._damaged.discard(name)
        self._note(name, True)

    def remove(self, name: bytes) -> None:
        self._damaged.add(name)

    def touch(self, names: Sequence[bytes]) -> None:
        """Does nothing: the server sees which objects are requested."""

    def _ask(
        self, method: str, name: bytes, *, body: bytes | None = None, start: int = 0
    ) -> tuple[int, int, np.ndarray]:
        """Send a request → (status, size of the whole object, its bytes from `start` on, uint8). Raises OSError."""
        headers = dict(self._server.headers)
        if start:
            headers["Range"] = f"bytes={start}-"
        if body is not None:
            headers["Content-Type"] = "application/octet-stream"
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        is_fresh = connection is None
        connection = connection or self._server.connection(_SECONDS)
        try:
            connection.request(method, f"{self._server.path}/blocks/{name.hex()}", body, headers)
            response = connection.getresponse()
            answer = self._answer(method, response, start)
        except (http.client.HTTPException, ConnectionError) as error:
            connection.close()
            if not is_fresh:  # the server has closed it, since it was idle for too long
                return self._ask(method, name, body=body, start=start)
            if not isinstance(error, http.client.HTTPException):
                raise
            raise ConnectionError(f"no answer in HTTP ({type(error).__name__}: {error})") from None
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if response.isclosed() and not response.will_close and len(self._idle) < _IDLE:
                self._idle.append(connection)
                return answer
        connection.close()
        return answer

    def _answer(self, method: str, response: http.client.HTTPResponse, start: int) -> tuple[int, int, np.ndarray]:
        status, piece = response.status, np.empty(0, np.uint8)
        expected = {"GET": (200, 206, *_MISSING), "HEAD": (200, *_MISSING), "PUT": (200, 201, 204)}[method]
        if status not in expected:
            response.read(_PIECE)
            raise OSError(f"the server answered {method} with {status} {response.reason}")
        if method != "GET" or status in _MISSING:
            response.read(_PIECE)
            return status, 0, piece
        length = response.getheader("Content-Length", "")
        whole = int(length) if length.isdecimal() else -1
        if status == 206:
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.getheader("Content-Range", ""))
            if match is None or int(match[1]) != start:
                raise OSError("the server sent another part of the block than was requested")
            whole = int(match[2])
        if not 0 <= whole <= self._limit:
            raise OSError("the block has no length, or is larger than a block can be")
        piece, end = np.empty(max(0, whole - start), np.uint8), 0  # large ones in huge pages
        while end < len(piece) and (count := response.readinto(piece.data[end : end + _PIECE])):
            end += count
        if response.read(1):
            raise OSError("the server sent more than the block has")
        return status, whole, piece[:end]
