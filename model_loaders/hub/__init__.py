"""Downloads models from the Hugging Face hub into the cache that its own programs use."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.files.folder import read_configuration
from polarlm.model_loaders.files.gguf_source import sizes_from_beginning
from polarlm.model_loaders.files.safetensors_source import INDEX, SINGLE
from polarlm.model_loaders.hub.choice import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BESIDE_WEIGHTS,
    CONFIG,
    PREFIX,
    HubFile,
    HubName,
    choose_gguf,
    has_safetensors,
    named,
    parse,
    projectors,
    quantization_of,
    quantizations,
    size_text,
)
from polarlm.model_loaders.hub.client import Client, Listing
from polarlm.model_loaders.hub.local import shards
from polarlm.model_loaders.hub.problems import RESUMES, cannot_be_reached, sentence
from polarlm.model_loaders.hub.transfer import fetch_file, partial_file
from polarlm.model_loaders.towers import reads_images

__all__ = ["PREFIX", "Fits", "HubName", "fetch", "fetch_adapter", "named", "parse", "quantization_of", "size", "sizes"]

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Gets the bytes that have arrived, and the bytes of all files."""

Fits = Callable[[ModelConfig | None, int], bool]
"""Whether a model with this configuration (None: unknown) and this many bytes of files fits in memory here."""

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_WORTH_SAYING = 1 << 20  # bytes; smaller downloads, such as configurations, are not announced
_HEAD_BYTES = 1 << 18  # the beginning of a GGUF file has its sizes, before its vocabulary


def fetch(
    name: HubName,
    fits: Fits | None = None,
    verbose: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Path:
    """The path of the model in the hub's cache, a folder or a .gguf file; the model is downloaded if need be.

    fits: chooses among GGUF files if `name` does not; None takes the best. verbose: gets lines of progress; with it, a
    terminal also shows a progress bar. progress: gets what has arrived of weights. Raises LoadError.
    """
    return _Fetching(name, fits, verbose, progress).told(_Fetching.run)


def fetch_adapter(name: HubName, verbose: Callable[[str], None] | None = None) -> Path:
    """The path of an adapter (LoRA) in the hub's cache, a folder or a .gguf file; it is downloaded if need be.

    Raises LoadError.
    """
    return _Fetching(name, verbose=verbose, of_adapter=True).told(_Fetching.run)


def sizes(name: HubName) -> tuple[ModelConfig, list[tuple[str, int]]]:
    """The configuration of a model on the hub, and its files, the best first: (quantization, bytes) for each GGUF file,
    or one ("", bytes) for safetensors. Downloads no weights. Raises LoadError."""
    return _Fetching(name).told(_Fetching.sizes)


def size(name: HubName) -> int:
    """Bytes of the GGUF files that a name with a quantization means. Downloads nothing. Raises LoadError."""

    def listed(fetching: _Fetching) -> int:
        return choose_gguf(name, fetching._client.listing(name).files.values(), lambda size: True).size

    return _Fetching(name).told(listed)


class _Fetching:
    def __init__(
        self,
        name: HubName,
        fits: Fits | None = None,
        verbose: Callable[[str], None] | None = None,
        progress: Progress | None = None,
        *,
        of_adapter: bool = False,
    ) -> None:
        self._client, self._name, self._fits = Client(), name, fits or (lambda config, size: True)
        self._say, self._is_silent = verbose or (lambda text: None), verbose is None
        self._progress, self._of_adapter = progress, of_adapter
        self._listing = Listing(name.repo, "", {})
        self._is_cut_off = False  # whether the hub cannot be reached and the listing comes from the cache

    def told(self, work: Callable[[_Fetching], T]) -> T:
        """What `work` returns, with errors of the hub and of its cache as LoadErrors."""
        try:
            return work(self)
        except (self._client.http_error, OSError) as error:
            raise LoadError(sentence(self._client, self._name, error)) from error
        except KeyboardInterrupt:
            if self._client.has_begun(self._name.repo):
                self._say(RESUMES)
            raise

    def run(self) -> Path:
        """The path of the model."""
        try:
            self._listing = self._client.listing(self._name)
        except (self._client.http_error, OSError) as error:
            kept = self._client.cached_listing(self._name) if cannot_be_reached(self._client, error) else None
            if kept is None:
                raise
            self._listing = kept
            why = "HF_HUB_OFFLINE is set" if self._client.is_offline else "The hub cannot be reached"
            self._say(f"{why}: using {self._name.repo} as it is in the cache (commit {kept.commit[:8]}).")
            self._is_cut_off = True
            try:
                return self._model()
            except LoadError as problem:
                raise LoadError(
                    f"{problem} This is about what the cache has; with a connection to the hub there may be more."
                ) from error
        if self._listing.repo.lower() != self._name.repo.lower():
            self._say(f"{self._name.repo} is called {self._listing.repo} today.")
        path = self._model()
        self._client.remember(self._name, self._listing.commit)
        return path

    def sizes(self) -> tuple[ModelConfig, list[tuple[str, int]]]:
        """What the module's `sizes` returns."""
        self._listing = self._client.listing(self._name)
        files = self._listing.files
        if self._name.quantization is None and has_safetensors(files):
            weights = [SINGLE] if SINGLE in files else [path for path in files if _SHARD.fullmatch(path)]
            folder = self._fetch([files[CONFIG]])[0].parent
            return read_configuration(folder), [("", sum(files[path].size for path in weights))]
        models = quantizations(files.values())
        if self._name.quantization is not None:
            models = [choose_gguf(self._name, files.values(), lambda size: True)]
        config = next(filter(None, (self._configuration(model.files[0]) for model in models)), None)
        if config is None:
            raise LoadError(
                self._no_model() if not models else f"The files of {self._name.repo} do not say their sizes."
            )
        return config, [(model.label, model.size) for model in models]

    def _adapter(self) -> Path:
        files = self._listing.files
        if self._name.quantization is None and {ADAPTER_CONFIG, ADAPTER_WEIGHTS} <= files.keys():
            return self._fetch([files[ADAPTER_CONFIG], files[ADAPTER_WEIGHTS]])[0].parent
        if quantizations(files.values()):
            return self._fetch(choose_gguf(self._name, files.values(), lambda size: True, self._is_here).files)[0]
        raise LoadError(
            f"{self._name.repo} has neither {ADAPTER_WEIGHTS} with {ADAPTER_CONFIG} nor GGUF files: choose a "
            "repository that holds an adapter."
        )

    def _model(self) -> Path:
        if self._of_adapter:
            return self._adapter()
        files = self._listing.files
        if self._name.quantization is None and has_safetensors(files):
            return self._folder()
        if quantizations(files.values()):
            return self._gguf()
        raise LoadError(self._no_model())

    def _no_model(self) -> str:
        files, name = self._listing.files, self._name
        if has_safetensors(files):
            return (
                f"{name.repo} has safetensors and no GGUF files: leave out :{name.quantization}; weights can be "
                "converted while they are loaded (--weight-type)."
            )
        if ADAPTER_CONFIG in files:
            return f"{name.repo} holds an adapter (LoRA), not a model: choose its base model, and give it with --lora."
        if any(path.endswith((".bin", ".pth", ".pt")) for path in files):
            return (
                f"{name.repo} holds its weights as pickles, which can run any code when opened and are not read: "
                "choose a repository with safetensors or GGUF files."
            )
        return f"{name.repo} has neither {SINGLE} with a {CONFIG} nor GGUF files: choose a repository that has."

    def _folder(self) -> Path:
        """The path of a folder of safetensors. Downloads the configuration first, since it may not be supported."""
        files = self._listing.files
        config = self._fetch([files[CONFIG]])[0]
        model = read_configuration(config.parent)
        wanted = [files[path] for path in BESIDE_WEIGHTS if path in files]
        if SINGLE in files:
            weights = [files[SINGLE]]
        else:
            paths = shards(self._fetch([files[INDEX]])[0].parent)
            if missing := [path for path in paths if path not in files]:
                raise LoadError(
                    f"{self._name.repo} lacks {missing[0]}, which its {INDEX} names: choose another repository of this "
                    "model."
                )
            weights = [files[path] for path in paths]
        size = sum(file.size for file in weights)
        if not self._fits(model, size) and not all(map(self._is_here, weights)):
            self._say(
                f"warning: the weights of {self._name} take {size_text(size)}, which leaves too little memory here for "
                "its KV store; choose a smaller model, a GGUF file of it, or another type of weights (--weight-type)"
            )
        self._fetch([*wanted, *weights])
        return config.parent

    def _gguf(self) -> Path:
        """The path of a GGUF file. Reads the beginning of one first, since its model may not be supported."""
        files = list(self._listing.files.values())
        models = quantizations(files)
        config = None if self._is_cut_off else self._configuration(models[0].files[0])
        chosen = choose_gguf(self._name, files, lambda size: self._fits(config, size), self._is_here)
        if self._name.quantization is None and len(models) > 1:
            is_here = all(map(self._is_here, chosen.files))
            why = "which is in the cache" if is_here else "the best that fits in memory here"
            self._say(f"Taking {chosen.label} of {self._name.repo}, {why}; {self._name.repo}:NAME takes another.")
        return self._fetch([*chosen.files, *self._projector(chosen.files[0], config)])[0]

    def _projector(self, chosen: HubFile, config: ModelConfig | None) -> list[HubFile]:
        """The part of a model that reads images, in the folder of its file; nothing without one of a known kind."""
        folder = chosen.path.rpartition("/")[0]
        files = [file for file in self._listing.files.values() if file.path.rpartition("/")[0] == folder]
        found = projectors(files, lambda file: file.name)
        if config is None:
            found = list(filter(self._is_here, found))
        return found[:1] if config is None or reads_images(config.family) else []

    def _configuration(self, file: HubFile) -> ModelConfig | None:
        """The configuration in the beginning of a GGUF file; None if it is not there. Raises LoadError for a model that
        is not supported."""
        head = bytearray()
        url = self._client.url(self._name.repo, self._listing.commit, file.path)
        with self._client.stream(url, f"bytes=0-{_HEAD_BYTES - 1}") as response:
            for part in response.iter_bytes(_HEAD_BYTES):
                head += part
                if len(head) >= _HEAD_BYTES:
                    break
        return sizes_from_beginning(bytes(head), f"{file.name} of {self._name.repo}")

    def _is_here(self, file: HubFile) -> bool:
        return self._client.cached(self._name.repo, self._listing.commit, file.path) is not None

    def _fetch(self, files: Sequence[HubFile]) -> list[Path]:
        """The paths of these files, in order; missing ones are downloaded. Raises LoadError if the disk is too full."""
        client, repo, commit = self._client, self._name.repo, self._listing.commit
        missing = [file for file in files if not self._is_here(file)]
        total, begun = 0, 0
        for file in missing:
            blob = client.blob(repo, file)
            if not blob.exists():
                total += file.size
                partial = partial_file(blob)
                begun += min(partial.stat().st_size, file.size) if partial.exists() else 0
        self._check_disk(total - begun)
        done = begun

        def moved(count: int) -> None:
            nonlocal done
            done += count
            bar.update(count)
            if self._progress is not None and total > _WORTH_SAYING:
                self._progress(done, total)

        with self._bar(files, total, begun) as bar:
            return [fetch_file(client, repo, commit, file, moved, self._say) for file in files]

    def _check_disk(self, size: int) -> None:
        cache = self._client.cache
        folder = next((one for one in (cache, *cache.parents) if one.exists()), cache)  # Windows may lack the drive
        if size > (free := shutil.disk_usage(folder).free):
            raise LoadError(
                f"{self._name} takes {size_text(size)} more on the disk, and {cache} has room for "
                f"{size_text(free)}: free some space, set HF_HOME to a folder elsewhere, or choose a smaller model."
            )

    def _bar(self, files: Sequence[HubFile], total: int, begun: int) -> Any:
        """A progress bar over `total` bytes, `begun` of them already there; it is shown on a terminal."""
        from tqdm import tqdm  # imported only to download: it takes 2 MB

        if total > _WORTH_SAYING:
            rest = f", {size_text(begun)} of them already there" if begun else ""
            self._say(
                f"Downloading {self._name} ({size_text(total)}{rest}) to {self._client.repo_folder(self._name.repo)}"
            )
        return tqdm(
            total=total,
            initial=begun,
            desc=f"Downloading {files[-1].name}" if len(files) == 1 else f"Downloading {self._name.short}",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            leave=False,
            delay=0.3,
            disable=self._is_silent or None,
        )
