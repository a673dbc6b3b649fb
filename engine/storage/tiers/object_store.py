"""A tier in an object store, such as a bucket, a folder behind WebDAV or Redis, by the library OpenDAL.

The objects and their names are those of a tier in a folder. The store removes what is old by rules of its own, if it
has any. Credentials come from where OpenDAL looks for them, such as environment variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from polarlm.engine.storage.objects import NAME_END, read_name
from polarlm.model_loaders.forks import renew_in_children
from polarlm.model_loaders.recent import Recent

if TYPE_CHECKING:
    from opendal import Operator

_SECONDS = 2.0  # the time limit of an operation, or of each piece of an object
_MOST_PRESENT = 1 << 16  # names of objects that are known to be there
_PROBE = "polarlm-probe"  # the object that is written and removed when a store is opened
_SERVICES = {"s3": "s3", "gs": "gcs", "az": "azblob", "redis": "redis", "webdav": "webdav", "webdavs": "webdav"}
SCHEMES = tuple(_SERVICES)

T = TypeVar("T")


class ObjectStoreTier:
    """Objects below a URL such as s3://bucket/prefix, whose query may have options of OpenDAL."""

    label = "remote"
    contents = None
    readers = 16  # most of the time goes to waiting for answers

    def __init__(self, url: str):
        """Raises ImportError without OpenDAL, ValueError for a URL that it does not take, and OSError if the store
        cannot be written."""
        self.place = f"remote ({without_secrets(url)})"
        self._operator: Operator | None = _open(url)
        # A turn asks for all blocks before it, most of which have just been read or written.
        self._present: Recent[bytes, bool] = Recent(_MOST_PRESENT)
        renew_in_children(self)
        self._run(lambda operator: operator.write(_PROBE, b"polarlm"))
        self._run(lambda operator: operator.delete(_PROBE))

    def renew(self) -> None:
        """In a forked child, ask nothing: OpenDAL's threads are the parent's, and a call would never return."""
        self._operator = None

    def has(self, name: bytes) -> bool:
        if self._present.get(name):
            return True
        # The beginning of an object, since not every WebDAV server says whether there is one.
        start = self._run(lambda operator: operator.read(name.hex(), offset=0, size=NAME_END))
        return self._note(name, start is not None and read_name(start) == name)

    def read(self, name: bytes) -> bytes | None:
        content = self._run(lambda operator: operator.read(name.hex()))
        self._note(name, content is not None)
        return content

    def write(self, name: bytes, header: bytes, payload: memoryview) -> None:
        self._run(lambda operator: operator.write(name.hex(), b"".join((header, payload))))
        self._note(name, True)

    def remove(self, name: bytes) -> None:
        self._note(name, False)
        self._run(lambda operator: operator.delete(name.hex()))

    def touch(self, names: Sequence[bytes], seconds: int = 0) -> None:
        """Does nothing: a store sees which objects are read."""

    def _note(self, name: bytes, is_there: bool) -> bool:
        if is_there:
            self._present.put(name, True)
        else:
            self._present.drop(name)
        return is_there

    def _run(self, work: Callable[[Operator], T]) -> T | None:
        """Return the result of `work`; None if there is no such object. Raises OSError."""
        from opendal.exceptions import NotFound

        if self._operator is None:
            raise OSError("a forked process cannot reach it")
        try:
            return work(self._operator)
        except NotFound:
            return None
        except Exception as error:  # OpenDAL's have no common base
            raise OSError(_reason(error)) from None


def without_secrets(url: str) -> str:
    """Return a URL for users, without a password and options."""
    return re.sub("://[^/?]*@", "://", url).partition("?")[0]


def _open(url: str) -> Operator:
    from opendal import Operator
    from opendal.layers import TimeoutLayer

    scheme, _, rest = url.partition(":")
    try:
        if _SERVICES[scheme] == "webdav":
            operator = Operator("webdav", **_webdav_options(urlsplit(url)))
        else:
            operator = Operator.from_uri(f"{_SERVICES[scheme]}:{rest}")
    except Exception as error:
        raise ValueError(_reason(error)) from None
    return operator.layer(TimeoutLayer(timeout=_SECONDS, io_timeout=_SECONDS))


def _webdav_options(parts: SplitResult) -> dict[str, str]:
    """Return OpenDAL's options, which takes every URL of WebDAV for one of TLS, and knows no login in it."""
    scheme, host = "https" if parts.scheme == "webdavs" else "http", parts.netloc.rpartition("@")[2]
    # A folder is looked up by PROPFIND before it is made, which nginx does not answer.
    options = {"endpoint": f"{scheme}://{host}", "root": parts.path or "/", "disable_create_dir": "true"}
    if parts.username:
        options |= {"username": unquote(parts.username), "password": unquote(parts.password or "")}
    return options | dict(parse_qsl(parts.query))


def _reason(error: Exception) -> str:
    """Return what an error of OpenDAL says in a line: what failed, and its source, without where in the program."""
    lines = [line.strip() for line in str(error).splitlines() or [type(error).__name__]]
    what, source = lines[0].partition("=> ")[2] or lines[0], ""
    if what.startswith("<") and (status := re.search(r"status: (\d+)", str(error))):  # a page for browsers
        what = f"{type(error).__name__}, status {status[1]}"
    if "Source:" in lines[:-1]:
        source = f" ({lines[lines.index('Source:') + 1]})"
    return what + source
