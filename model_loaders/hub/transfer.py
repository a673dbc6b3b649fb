"""Transfers files of a repository to the hub's cache. Interrupted transfers resume, and checksums are compared.

The package huggingface_hub finds the files and places them in its cache. It does not transfer them: its newer versions
begin an interrupted file anew, and no version compares checksums.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.files.repository import RepositoryFile
from polarlm.model_loaders.hub.client import has_size

if TYPE_CHECKING:
    from polarlm.model_loaders.hub.client import Client

AddBytes = Callable[[int], Any]
_PART_BYTES = 1 << 20
_WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds before the next attempt after one that transferred nothing
_TROUBLE = (500, 502, 503, 504)  # statuses of the server after which the next attempt may succeed


def fetch_file(
    client: Client, repo: str, commit: str, file: RepositoryFile, add_bytes: AddBytes, say: Callable[[str], None]
) -> Path:
    """The path of `file` in the hub's cache; the file is downloaded if need be.

    add_bytes: gets the number of bytes that arrived; negative for bytes that must be transferred again. Raises
    LoadError for a file with another checksum, and the errors of the transfer, after which the bytes that arrived are
    kept.
    """
    if (cached := client.cached_file(repo, commit, file)) is not None:
        return cached
    blob = client.blob(repo, file)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with client.lock(repo, file, lambda: say(f"Waiting for another process, which downloads {file.name}.")):
        if not has_size(blob, file):
            partial = partial_file(blob)
            with partial.open("a+b") as sink:
                content = _ReceivedBytes(sink, repo, file, add_bytes)
                _fill(client, client.url(repo, commit, file.path), content)
                content.check()
            os.replace(partial, blob)
        if client.cached_file(repo, commit, file) is None:
            client.place_of(repo, commit, file).unlink(missing_ok=True)  # the package takes what is there as it is
    return client.place_file(repo, commit, file.path)


def is_damaged(path: Path, file: RepositoryFile, add_bytes: AddBytes) -> bool:
    """Whether what lies at `path` has another hash than `file`, if that is known. add_bytes: gets the number of bytes
    that were read."""
    if not file.digest:
        return False
    with path.open("rb") as content:
        return str(_hash_of(content, file, add_bytes).hexdigest()) != file.digest


def partial_file(blob: Path) -> Path:
    """The file that holds the bytes of `blob` that have arrived."""
    return blob.with_name(f"{blob.name}.http.incomplete")


class _ReceivedBytes:
    """The bytes of a file that have arrived, and their hash."""

    def __init__(self, sink: BinaryIO, repo: str, file: RepositoryFile, add_bytes: AddBytes) -> None:
        """sink: a file open for appending and reading; the bytes of an earlier attempt are kept."""
        self.file, self._repo, self._sink, self._add_bytes = file, repo, sink, add_bytes
        sink.seek(0)
        self._hash = _hash_of(sink, file, lambda count: None)
        self.size = sink.tell()
        if self.size > file.size:
            self.restart()

    def append(self, part: bytes) -> None:
        """Append bytes. Raises LoadError for more bytes than the file has, OSError if the disk is full."""
        if self.size + len(part) > self.file.size:
            raise self._wrong()
        self._sink.write(part)
        self._hash.update(part)
        self.size += len(part)
        self._add_bytes(len(part))

    def restart(self) -> None:
        """Drop all bytes."""
        self._add_bytes(-self.size)
        self._sink.truncate(0)
        self.size, self._hash = 0, _new_hash(self.file)

    def check(self) -> None:
        """Raises LoadError if the hash is not the file's hash."""
        if self._hash.hexdigest() != self.file.digest:
            raise self._wrong()

    def _wrong(self) -> LoadError:
        self.restart()
        return LoadError(
            f"{self.file.name} of {self._repo} arrived with another checksum than the hub names, and was deleted: try "
            "again, and if that does not help, look whether a proxy changes downloads."
        )


def _new_hash(file: RepositoryFile) -> Any:
    if file.lfs:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)  # Git's hash of a file


def _hash_of(content: BinaryIO, file: RepositoryFile, add_bytes: AddBytes) -> Any:
    """A hash of the kind that `file` has, which has read `content`."""
    content_hash = _new_hash(file)
    while part := content.read(_PART_BYTES):
        content_hash.update(part)
        add_bytes(len(part))
    return content_hash


def _fill(client: Client, url: str, content: _ReceivedBytes) -> None:
    """Fetch the missing bytes. Attempts are repeated as long as they transfer some, and a few times if they do not."""
    waits = iter(_WAITS)
    while (begin := content.size) < content.file.size:
        error: Exception = ConnectionError(errno.ECONNRESET, "the hub closed the connection early")
        try:
            _receive(client, url, content)
        except client.http_error as problem:
            status = client.status(problem)
            if status is not None and status not in _TROUBLE:
                raise
            error = problem
        if content.size > begin:
            waits = iter(_WAITS)
        elif (wait := next(waits, None)) is not None:
            time.sleep(wait)
        else:
            raise error


def _receive(client: Client, url: str, content: _ReceivedBytes) -> None:
    begin = content.size
    with client.stream(url, f"bytes={begin}-" if begin else None) as response:
        if begin and response.status_code != 206:
            content.restart()  # the server does not know ranges
        for part in response.iter_bytes():  # as they arrive: with a fixed size, an incomplete last part would be lost
            content.append(part)
