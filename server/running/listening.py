"""Sockets that listen before a model is loaded, so that a port in use is an error at once; clients who come early."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import re
import selectors
import socket
import stat
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

HEALTH_PATHS = ("/health", "/v1/health", "/ping")  # vLLM's name of it is the last
BACKLOG = 128  # connections that the system holds until they are accepted
_OTHER_FILES = 256  # files that the process opens in addition to its connections
_LOG = logging.getLogger(__name__)
_LOST_AFTER = 20  # seconds without an answer until a peer counts as lost


class ListenError(Exception):
    """The server cannot listen at its address. The message is a sentence for the user."""


def tcp_socket(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening socket bound to `host`, by IPv4 if it has both. flag: the flag of `port`. Raises ListenError."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ListenError(f"--host {host}: there is no such address ({error})") from None
    family, kind, protocol, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere this option shares a port that is in use
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # here already: two sockets that are only bound could share the port
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"Port {port} of {host} is in use: choose another, or {flag} 0 for a free one") from None
        raise ListenError(f"Cannot listen at port {port} of {host}: {error.strerror or error}") from None
    return listener


@contextmanager
def unix_socket(path: str) -> Iterator[socket.socket]:
    """Yields a listening socket at `path` that only its owner can open, and removes its file at the end. A socket file
    without a listener is replaced. Raises ListenError."""
    if not hasattr(socket, "AF_UNIX"):
        raise ListenError("--unix: this system's Python has no Unix sockets; use --socket-port")
    _remove_unused(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(path)
            os.chmod(path, 0o600)  # before `listen`, since no client can connect until then
            listener.listen(BACKLOG)
            inode = os.stat(path).st_ino
        except OSError as error:
            raise ListenError(f"--unix {path}: cannot listen there: {error.strerror or error}") from None
        try:
            yield listener
        finally:
            with suppress(OSError):
                if os.stat(path).st_ino == inode:  # still this socket's file
                    os.unlink(path)


def _remove_unused(path: str) -> None:
    """Remove a socket file without a listener. Raises ListenError if another file or server is at the path."""
    try:
        mode = os.stat(path, follow_symlinks=False).st_mode
    except OSError:
        return  # there is no file, or `bind` fails with a better reason
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"--unix {path}: there is a file that is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(5)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            with suppress(FileNotFoundError):
                os.unlink(path)
            return
        except OSError as error:
            raise ListenError(f"--unix {path}: cannot be accessed: {error.strerror or error}") from None
    raise ListenError(f"--unix {path}: another server listens there; choose another path")


def address_of(listener: socket.socket) -> str:
    """Where a socket listens: "127.0.0.1:8080", "[::1]:8080", or a path."""
    name = listener.getsockname()
    if isinstance(name, str):
        return name
    return f"[{name[0]}]:{name[1]}" if listener.family == socket.AF_INET6 else f"{name[0]}:{name[1]}"


def is_local(listener: socket.socket) -> bool:
    """Whether only programs on this machine can connect."""
    name = listener.getsockname()
    return isinstance(name, str) or ipaddress.ip_address(name[0].split("%")[0]).is_loopback


def allow_open_files(connections: int) -> str | None:
    """Raise the soft limit of open files, usually 1024; return a warning if the system refuses."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return None
    required_files = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= required_files:
        return None
    most = required_files if hard == resource.RLIM_INFINITY else min(required_files, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):
        most = soft
    if most >= required_files:
        return None
    return (
        f"warning: this process may open {most} files, and needs {required_files} for all connections: raise the limit "
        "(ulimit -n), or lower --max-connections"
    )


def quiet_accept_errors() -> Callable[[AbstractEventLoop, dict[str, Any]], None]:
    """A loop's exception handler that logs once a second at most that connections cannot be accepted: the loop itself
    would log a traceback for each of them, at every attempt."""
    last = -1.0

    def handle(loop: AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        error, message = context.get("exception"), str(context.get("message")).lower()
        if isinstance(error, ValueError) and "_start_serving" in message:
            return  # the loop retried after the server had stopped listening
        if not isinstance(error, OSError) or "accept" not in message:
            loop.default_exception_handler(context)
        elif time.monotonic() - last >= 1:
            last = time.monotonic()
            _LOG.warning("a connection cannot be accepted now: %s", error.strerror)

    return handle


def notice_lost_peers(connection: socket.socket) -> None:
    """Have the system close a connection whose peer's machine no longer answers."""
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        for option in lost_peer_options():
            connection.setsockopt(*option)


def lost_peer_options() -> list[tuple[int, int, int]]:
    """The arguments of `setsockopt` for `notice_lost_peers`, of a TCP socket."""
    # A system without one of these options uses its own, longer time.
    probes = {"TCP_KEEPIDLE": _LOST_AFTER // 2, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}
    limits = {**probes, "TCP_USER_TIMEOUT": 1000 * _LOST_AFTER}.items()
    present = [(getattr(socket, name), limit) for name, limit in limits if hasattr(socket, name)]
    keepalive = (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return [keepalive, *((socket.IPPROTO_TCP, option, limit) for option, limit in present)]


_PROBE = re.compile(rf"(GET|HEAD) ({'|'.join(HEALTH_PATHS)})[ ?]".encode())
_PEEK_BYTES = 32  # bytes, more than the start of a probe
_BODY = b'{"status": "loading"}'
_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n"
) % len(_BODY)


class EarlyClients:
    """A context that accepts connections in a thread, until `hand_over`. Health probes are answered with 503 at once;
    all other connections are kept, with what their clients have sent."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._connections = listener, list[socket.socket]()
        self._wake_writer, self._wake_reader = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="early clients", daemon=True)

    def __enter__(self) -> EarlyClients:
        self._listener.setblocking(False)
        for waitable in (self._listener, self._wake_reader):
            self._selector.register(waitable, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self.hand_over():
            connection.close()

    def hand_over(self) -> list[socket.socket]:
        """Accept no more connections; return the connections that were kept. A second call returns none."""
        self._wake_writer.close()
        self._thread.join()
        connections, self._connections = self._connections, []
        return connections

    def _run(self) -> None:
        with self._selector, self._wake_reader:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._wake_reader:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        self._look_at(key.fileobj)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has hung up
            return
        connection.setblocking(False)
        self._connections.append(connection)
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._connections) == BACKLOG:
            self._selector.unregister(self._listener)  # the system holds further ones

    def _look_at(self, connection: socket.socket) -> None:
        """Answer a probe. The first bytes of any other request are peeked at once, and stay in the socket's buffer."""
        self._selector.unregister(connection)
        try:
            start = connection.recv(_PEEK_BYTES, socket.MSG_PEEK)
        except OSError:
            start = b""
        if start and _PROBE.match(start) is None:
            return
        if start:
            with suppress(OSError):
                while connection.recv(1 << 16):  # unread data would reset the connection before the answer is read
                    pass
            with suppress(OSError):
                connection.sendall(_ANSWER if start.startswith(b"HEAD") else _ANSWER + _BODY)
        connection.close()
        self._connections.remove(connection)
