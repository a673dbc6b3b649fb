"""The models that lie in the hub's cache. Reads the file system only, and no weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.files.file_bytes import FileBytes
from polarlm.model_loaders.files.gguf_file import GgufFile
from polarlm.model_loaders.files.repository import RepositoryFile, files_of, models_in
from polarlm.model_loaders.files.safetensors_source import INDEX, SINGLE, read_header, read_index, weight_files
from polarlm.model_loaders.hub.choice import has_safetensors

_LEAST_WORDS = 4  # letters that say more than nothing
_FOLDER = "models--"  # the beginning of the name of a model's folder, which has the owner and the repository after it


@dataclass(frozen=True)
class Local:
    """A model in the hub's cache, complete."""

    name: str  # user/repo, or user/repo:Q4_K_M for a GGUF file; the file's own name if two have one quantization
    path: Path  # as engines load it: a folder, or the (first) .gguf file
    bytes: int  # of all files
    revision: str  # the commit
    files: tuple[Path, ...]  # links to the files' contents; a folder's are all but GGUF files
    times: tuple[int, ...]  # when these files were changed: damaged ones may be mended; nanoseconds

    def is_damaged(self) -> bool:
        """Whether a file is empty, or ends before its header says. Reads headers."""
        try:
            if self.path.is_file():
                GgufFile(self.path).close()
            for file in (file for file in self.files if file.suffix == ".safetensors"):
                with closing(FileBytes(file)) as source:
                    read_header(source)
        except LoadError as problem:
            return "download" in str(problem)
        return not all(file.stat().st_size for file in self.files)


def models() -> list[Local]:
    """The complete models in the hub's cache, by name; of several commits, that of `main` counts, else the newest.

    None without the package huggingface_hub, which knows where the cache is."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return []
    by_name: dict[str, Local] = {}
    for folder in Path(constants.HF_HUB_CACHE).glob(f"{_FOLDER}*"):
        repo = folder.name.removeprefix(_FOLDER).replace("--", "/")
        try:
            for snapshot in sorted((folder / "snapshots").glob("*"), key=_age(folder)):
                for model in _in_snapshot(repo, snapshot):
                    by_name.setdefault(model.name, model)
        except OSError:  # it may be another user's, or be removed just now
            continue
    return [by_name[name] for name in sorted(by_name)]


def find_similar(text: str) -> str | None:
    """The one model whose name has the words of what another program calls `text`; None for several or none."""
    words = [word for word in re.split(r"[:/\s_-]+", text.lower()) if word not in ("", "latest")]
    if len("".join(words)) < _LEAST_WORDS:
        return None
    names = [one.name for one in models() if all(word in re.sub(r"[^\w.]|_", "", one.name.lower()) for word in words)]
    return names[0] if len(names) == 1 else None


def _age(folder: Path) -> Callable[[Path], tuple[bool, float]]:
    """The order of a repository's commits: that of `main` first, then the newest."""
    try:
        main = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        main = ""
    return lambda snapshot: (snapshot.name != main, -snapshot.stat().st_mtime)


def _in_snapshot(repo: str, snapshot: Path) -> Iterator[Local]:
    files = files_of(snapshot)

    def model(name: str, path: Path, parts: list[RepositoryFile]) -> Local:
        paths = tuple(snapshot / file.path for file in parts)
        times = tuple(file.stat().st_mtime_ns for file in paths)
        return Local(name, path, sum(file.size for file in parts), snapshot.name, paths, times)

    if _is_whole(snapshot, files):
        yield model(repo, snapshot, [file for path, file in sorted(files.items()) if not path.endswith(".gguf")])
    ggufs = models_in(snapshot, files.values())
    labels = [gguf.label for gguf in ggufs]
    for gguf in ggufs:
        first = gguf.files[0]
        name = gguf.label if labels.count(gguf.label) == 1 else first.path
        yield model(f"{repo}:{name}", snapshot / first.path, list(gguf.files))


def _is_whole(snapshot: Path, files: Mapping[str, RepositoryFile]) -> bool:
    """Whether there are a configuration and all weights as safetensors."""
    try:
        if not has_safetensors(files):
            return False
        index = read_index(snapshot / INDEX) if INDEX in files and SINGLE not in files else {}
        return files.keys() >= set(weight_files({path: file.size for path, file in files.items()}, set(index.values())))
    except LoadError:
        return False
