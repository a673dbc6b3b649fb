"""A stand-in of the hub's HTTP interface on this machine, and of the CDN that it redirects to.

It answers as huggingface_hub expects: what a repository has, redirects for large files (LFS), ETags, commits, ranges,
error codes in headers; and it can make trouble.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "a" * 39
_LARGE = (".safetensors", ".gguf", ".bin", ".pth", ".onnx")


@dataclass
class Repository:
    """files: path → content of the newest commit. gated: only those in `readers` may read files."""

    files: dict[str, bytes]
    commit: str = f"{COMMIT}1"
    tags: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def revision(self, name: str) -> str | None:
        commits = {"main": self.commit, **self.tags}
        return commits.get(name, name if name in commits.values() else None)


@dataclass(frozen=True)
class HubRequest:
    """A request. server: "hub" or "cdn"."""

    server: str
    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Trouble:
    """What the servers do wrong, for files by their paths in the repository."""

    drop: dict[str, int] = field(default_factory=dict)  # close the connection after so many bytes, once
    then: list[tuple[str, int, dict[str, str]]] = field(default_factory=list)  # refusals behind such a close
    drop_always: set[str] = field(default_factory=set)  # close it before the first byte
    wrong: set[str] = field(default_factory=set)  # send other bytes
    no_ranges: bool = False  # the CDN sends the whole file for a range
    refuse: list[tuple[str, int, dict[str, str]]] = field(default_factory=list)  # (server, status, headers) of the next
    hold: dict[str, threading.Event] = field(default_factory=dict)  # wait in the middle of a file
    held: threading.Event = field(default_factory=threading.Event)  # set when one waits


class Hub:
    """Both servers. tokens: those that are valid; readers: those that may read gated and private repositories."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.renamed: dict[str, str] = {}
        self.tokens: set[str] = set()
        self.readers: set[str] = set()
        self.trouble = Trouble()
        self.requests: list[HubRequest] = []
        self.url = self.cdn = ""

    def ranges_of(self, path: str) -> list[str | None]:
        """The ranges of the GETs for the content of a file."""
        server = "cdn" if path.endswith(_LARGE) else "hub"
        return [
            request.range
            for request in self.requests
            if (request.server, request.method) == (server, "GET") and request.path.endswith(f"/{path}")
        ]


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub and its CDN, on ports of 127.0.0.1, until the block ends."""
    hub = Hub()
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub, name)) for name in ("hub", "cdn")]
    hub.url, hub.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for event in hub.trouble.hold.values():
            event.set()
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join(10)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _handler(hub: Hub, server: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            self.token = token
            hub.requests.append(HubRequest(server, self.command, unquote(url.path), self.headers.get("Range"), token))
            for index, (where, status, headers) in enumerate(hub.trouble.refuse):
                if where == server:
                    del hub.trouble.refuse[index]
                    self.answer(status, b"", headers)
                    return
            parts = unquote(url.path).strip("/").split("/")
            if server == "cdn":
                self.content(parts)
            elif parts[:2] == ["api", "models"]:
                self.information(parts[2:], parse_qs(url.query))
            else:
                self.resolve(parts)

        def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                with suppress(OSError):
                    self.wfile.write(body)

        def refuse(self, status: int, code: str, message: str) -> None:
            body = json.dumps({"error": message}).encode()
            headers = {"X-Error-Message": message, "Content-Type": "application/json"}
            self.answer(status, body, headers | ({"X-Error-Code": code} if code else {}))

        def repository(self, parts: list[str], prefix: str) -> Repository | None:
            """The repository, if it exists and the token may see it; else it is answered, and None."""
            name, rest = "/".join(parts[:2]), "/".join(parts[2:])
            if name in hub.renamed:
                query = urlsplit(self.path).query
                target = f"{prefix}/{hub.renamed[name]}/{rest}".rstrip("/") + (f"?{query}" if query else "")
                self.answer(307, b"", {"Location": target})
                return None
            if self.token is not None and self.token not in hub.tokens:
                self.refuse(401, "", "Invalid credentials in Authorization header")
                return None
            repository = hub.repositories.get(name)
            if repository is None or (repository.private and self.token not in hub.readers):
                status = 401 if self.token is None else 404
                self.refuse(status, "RepoNotFound", "Repository not found")
                return None
            return repository

        def information(self, parts: list[str], query: dict[str, list[str]]) -> None:
            repository = self.repository(parts, "/api/models")
            if repository is None:
                return
            revision = "/".join(parts[3:]) if parts[2:3] == ["revision"] else "main"
            commit = repository.revision(revision)
            if commit is None:
                self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
                return
            siblings: list[dict[str, object]] = []
            for path, content in repository.files.items():
                entry: dict[str, object] = {"rfilename": path}
                if "blobs" in query:
                    entry |= {"size": len(content), "blobId": git_hash(content)}
                    if path.endswith(_LARGE):
                        entry["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 134}
                siblings.append(entry)
            name = "/".join(parts[:2])
            about = {"id": name, "modelId": name, "sha": commit, "private": repository.private, "siblings": siblings}
            body = json.dumps(about | {"gated": "manual" if repository.gated else False, "tags": []}).encode()
            self.answer(200, body, {"Content-Type": "application/json"})

        def resolve(self, parts: list[str]) -> None:
            repository = self.repository(parts, "")
            if repository is None:
                return
            _, _, action, revision, *rest = parts
            path, commit = "/".join(rest), repository.revision(revision)
            assert action == "resolve"
            if commit is None:
                self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
                return
            if repository.gated and self.token not in hub.readers:
                status = 401 if self.token is None else 403
                self.refuse(status, "GatedRepo", f"Access to model {'/'.join(parts[:2])} is restricted.")
                return
            content = repository.files.get(path)
            if content is None:
                self.refuse(404, "EntryNotFound", "Entry not found")
            elif path.endswith(_LARGE):
                place = f"{hub.cdn}/{sha256(content)}/{path}"
                linked = {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
                # As for files that the hub stores in Xet: a client with hf_xet would fetch them in another way.
                xet = {"X-Xet-Hash": sha256(content), "Link": f'<{hub.url}/no-xet>; rel="xet-auth"'}
                self.answer(302, b"", {"Location": place, "X-Repo-Commit": commit, **linked, **xet})
            else:
                self.send(content, path, {"X-Repo-Commit": commit, "ETag": f'"{git_hash(content)}"'})

        def content(self, parts: list[str]) -> None:
            digest, path = parts[0], "/".join(parts[1:])
            for repository in hub.repositories.values():
                content = repository.files.get(path)
                if content is not None and sha256(content) == digest:
                    self.send(content, path, {"ETag": f'"{digest}"'})
                    return
            self.answer(404)

        def send(self, content: bytes, path: str, headers: dict[str, str]) -> None:
            trouble, begin, end, status = hub.trouble, 0, len(content), 200
            wanted = self.headers.get("Range")
            if wanted is not None and not trouble.no_ranges:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                begin, status = int(first), 206
                end = min(int(last) + 1, end) if last else end
                headers = {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}
            if path in trouble.wrong:
                content = bytes(byte ^ 1 for byte in content)
            body = content[begin:end]
            whole = wanted is None or wanted.endswith("-")  # not the beginning alone, which sizes are read from
            stop = len(body)
            if whole and path in trouble.drop_always:
                stop = 0
            elif whole and path in trouble.drop:
                stop = trouble.drop.pop(path)
                trouble.refuse += trouble.then
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), "Accept-Ranges": "bytes", **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            with suppress(OSError):
                if whole and path in trouble.hold:
                    self.wfile.write(body[: len(body) // 2])
                    self.wfile.flush()
                    trouble.held.set()
                    trouble.hold[path].wait(60)
                    body, stop = body[len(body) // 2 :], stop - len(body) // 2
                self.wfile.write(body[:stop])
                if stop < len(body):
                    self.close_connection = True
                    self.connection.shutdown(2)

    return Handler
