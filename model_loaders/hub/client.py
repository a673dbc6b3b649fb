"""What is used of the package huggingface_hub: the list of a repository's files, and their paths in the cache."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.files.repository import RepositoryFile, files_of
from polarlm.model_loaders.hub.choice import HubName

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256 = 64  # digits; Git's hash has fewer
_LEAST_VERSION = 1
_SECONDS = 10.0  # timeout of a request
_IS_FREE = 0.2  # seconds to wait for a lock before it counts as taken


@dataclass(frozen=True)
class Listing:
    """The files of one commit of a repository, by their paths."""

    repo: str  # its current name, which differs from the requested one if it was renamed
    commit: str
    files: dict[str, RepositoryFile]


def has_size(path: Path, file: RepositoryFile) -> bool:
    """Whether a path has as many bytes as a file of the hub; 0 of a listing may mean that it does not say."""
    return path.is_file() and file.size in (0, path.stat().st_size)


def _with_digest(path: Path, file: RepositoryFile) -> RepositoryFile:
    """A cached file with the digest that the name of its content is, if it is one."""
    name = path.resolve().name
    return replace(file, digest=name, lfs=len(name) == _SHA256) if _HASH.fullmatch(name) else file


class Client:
    """The hub and its cache, with the package's settings and token: HF_HOME, HF_ENDPOINT, HF_TOKEN and so on.

    Methods that need the network raise `http_error` or OSError, which include the errors of the package.
    """

    def __init__(self) -> None:
        """Raises LoadError if the package is not installed."""
        try:
            import huggingface_hub
            from huggingface_hub import constants, errors, utils
            from huggingface_hub.file_download import repo_folder_name

            if int(huggingface_hub.__version__.partition(".")[0]) < _LEAST_VERSION:
                raise ImportError(f"this is version {huggingface_hub.__version__}")
        except ImportError as error:
            raise LoadError(
                f"Models on the hub need the Python package huggingface_hub in version {_LEAST_VERSION} or newer "
                f"({error}): pip install 'polarlm[hub]'."
            ) from error
        self.errors = errors
        # The base class of all errors of the HTTP library, whichever it is: httpx, or httpx2 from version 2 on.
        self.http_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
        # Read here, so that a program may set them after it has imported huggingface_hub.
        self.endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self.cache = Path(constants.HF_HUB_CACHE)
        self.is_offline = bool(constants.HF_HUB_OFFLINE)
        self._hub, self._utils = huggingface_hub, utils
        self._folder_name = repo_folder_name

    @property
    def has_token(self) -> bool:
        """Whether requests carry a token."""
        return self._hub.get_token() is not None

    def listing(self, name: HubName) -> Listing:
        """The files of the requested revision, from one request."""
        api = self._hub.HfApi(endpoint=self.endpoint)
        info = api.model_info(name.repo, revision=name.revision, files_metadata=True, timeout=_SECONDS)
        files = [
            RepositoryFile(entry.rfilename, entry.lfs.size, entry.lfs.sha256, lfs=True)
            if entry.lfs
            else RepositoryFile(entry.rfilename, entry.size or 0, entry.blob_id or "")
            for entry in info.siblings or ()
        ]
        if info.sha is None or not _HASH.fullmatch(info.sha):
            raise LoadError(f"{self.endpoint} does not say which commit {name} is at: set HF_ENDPOINT to a hub.")
        # Paths and hashes become names of files in the cache.
        safe = (file for file in files if _HASH.fullmatch(file.digest) and ".." not in file.path.split("/"))
        return Listing(info.id, info.sha, {file.path: file for file in safe})

    def cached_listing(self, name: HubName) -> Listing | None:
        """The cached files of the commit that the revision was at when they were downloaded; None if there are none."""
        revision = name.revision or "main"
        try:
            commit = (self.repo_folder(name.repo) / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            commit = revision
        folder = self.repo_folder(name.repo) / "snapshots" / commit
        files = {path: _with_digest(folder / path, file) for path, file in files_of(folder).items()}
        return Listing(name.repo, commit, files) if files else None

    def remember(self, name: HubName, commit: str) -> None:
        """Note in the cache which commit the revision is at, for times without a connection."""
        revision = name.revision or "main"
        if revision != commit:
            ref = self.repo_folder(name.repo) / "refs" / revision
            if not ref.is_file() or ref.read_text(encoding="ascii") != commit:  # the cache may be read-only
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.write_text(commit, encoding="ascii")

    def repo_folder(self, repo: str) -> Path:
        return self.cache / self._folder_name(repo_id=repo, repo_type="model")

    def has_begun(self, repo: str) -> bool:
        """Whether the cache has any bytes of a repository's files."""
        blobs = self.repo_folder(repo) / "blobs"
        return blobs.is_dir() and any(file.stat().st_size for file in blobs.iterdir())

    def blob(self, repo: str, file: RepositoryFile) -> Path:
        """The path in the cache of a file's content, whether or not it exists."""
        return self.repo_folder(repo) / "blobs" / file.digest

    def place_of(self, repo: str, commit: str, file: RepositoryFile) -> Path:
        """A file's path in the cache, whether or not it exists."""
        return self.repo_folder(repo) / "snapshots" / commit / file.path

    def cached_file(self, repo: str, commit: str, file: RepositoryFile) -> Path | None:
        """A file's path in the cache; None if it is not there, or has another size than the hub lists."""
        path = self.place_of(repo, commit, file)
        return path if has_size(path, file) else None

    def place_file(self, repo: str, commit: str, path: str) -> Path:
        """The path in the cache of a file whose blob is there."""
        return Path(
            self._hub.hf_hub_download(repo, path, revision=commit, cache_dir=self.cache, endpoint=self.endpoint)
        )

    @contextmanager
    def lock(self, repo: str, file: RepositoryFile, on_wait: Callable[[], None]) -> Iterator[None]:
        """Holds the lock that every program that writes this blob takes. Calls `on_wait` if another one holds it."""
        from filelock import Timeout  # comes with huggingface_hub

        path = self.cache / ".locks" / self.repo_folder(repo).name / f"{file.digest}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._utils.WeakFileLock(path, timeout=_IS_FREE):
                yield
            return
        except Timeout:
            on_wait()
        with self._utils.WeakFileLock(path):
            yield

    def url(self, repo: str, commit: str, path: str) -> str:
        return str(self._hub.hf_hub_url(repo, path, revision=commit, endpoint=self.endpoint))

    @contextmanager
    def stream(self, url: str, byte_range: str | None) -> Iterator[Any]:
        """Yields the response to a GET of a file, or of a range of it, before its bytes are read."""
        headers = {**self._utils.build_hf_headers(), "Accept-Encoding": "identity"}
        if byte_range is not None:
            headers["Range"] = byte_range
        session = self._utils.get_session()
        with session.stream("GET", url, headers=headers, timeout=_SECONDS, follow_redirects=True) as response:
            self._utils.hf_raise_for_status(response)
            yield response

    @staticmethod
    def status(error: Exception) -> int | None:
        """The HTTP status that caused an error; None if there was no response."""
        return getattr(getattr(error, "response", None), "status_code", None)
