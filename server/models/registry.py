"""The models that a server has by name: from a folder, a TOML file, or names on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from glob import escape
from pathlib import Path
from typing import Any
from unicodedata import normalize

from polarlm.engine import EngineError
from polarlm.engine.cli.flags import WITHOUT_EFFECT, FlagError, advise, in_flags
from polarlm.engine.cli.sources import QUOTES, read_toml
from polarlm.engine.config import EngineConfig
from polarlm.engine.loading.checks import settle
from polarlm.model_loaders import LoadError, demo, hub, load_weights
from polarlm.model_loaders.files.folder import is_model
from polarlm.model_loaders.files.repository import files_of, models_in
from polarlm.model_loaders.hub import local
from polarlm.model_loaders.user_dirs import cache_folder
from polarlm.server.config import HUB
from polarlm.server.running.journal import note

_LATEST = ":latest"  # the tag that Ollama's clients add to a name
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_SETTINGS = {field.name.replace("_", "-"): field.name for field in fields(EngineConfig) if field.metadata["flags"]}
_SOURCES = {"weights", "hf-repo"}  # which `path` and `hf` say
_KEYS = ("path", "hf", "aliases", "pinned", "idle-unload")


@dataclass(frozen=True)
class NamedModel:
    name: str
    config: EngineConfig  # settled
    aliases: tuple[str, ...] = ()
    pinned: bool = False  # whether it stays in memory once it is loaded
    idle_minutes: float | None = None  # in place of --idle-unload

    @property
    def path(self) -> Path | None:
        """Its folder or file; None if that has to be fetched from the hub."""
        path = str(self.config.weights)
        return None if path.startswith(hub.PREFIX) else Path(path)


class Registry:
    """Models by name. A folder is read again for an unknown name, and for lists."""

    def __init__(
        self, common: EngineConfig, place: Path | str | None, names: Sequence[str], pinned: Sequence[str]
    ) -> None:
        """common: settings of all models. place: a folder of models, a TOML file, or HUB for what has been downloaded.
        names: those on the hub. pinned: names of models that stay in memory. Raises FlagError or EngineError."""
        self._common = common
        self._look: Callable[[EngineConfig], list[NamedModel]] | None = None
        if place == HUB:
            self._look = _models_of_hub
        elif place is not None and Path(place).is_dir():
            self._look = partial(_models_of_folder, Path(place))
        self._pinned: set[str] = set()
        self._fixed: dict[str, NamedModel] = {}
        self._folder_models: dict[str, NamedModel] = {}
        if place is not None and self._look is None:
            for named_model in _models_of_file(Path(place), common):
                self.add(named_model)
        for name in names:
            self.add(self.hub_model(name))
        models = self.models()
        if self._look is not None and not self._folder_models:
            what = "no model has been downloaded yet: polarlm pull NAME does it"
            what = what if place == HUB else "there is no .gguf file and no folder of a model in it"
            raise FlagError(f"--models {place}: {what}")
        for name in pinned:
            model = self.find(name)
            if model is None:
                raise FlagError(f"--pin {name}: there is no such model; there are {in_words(models)}")
            self._pinned.add(model.name)

    def models(self) -> list[NamedModel]:
        """All models: files of the folder, by name, then tables of the TOML file, then models of the hub. Raises
        EngineError if the folder cannot be read."""
        if self._look is not None:
            try:
                self._folder_models = {model.name: model for model in self._look(self._common)}
            except OSError as error:
                raise EngineError(f"The folder of --models cannot be read: {error.strerror}", "storage") from None
        return self._known_models()

    def find(self, name: str) -> NamedModel | None:
        """The model of this name or alias, or else the only one whose name differs in case or Unicode normal form.
        None if there is none. A name on the hub may lack its quantization. Raises EngineError if the folder cannot be
        read and had none of this name before."""
        name = _without_hub_address(name.removesuffix(_LATEST))
        model = _find_named(name, self._known_models())
        if model is None:
            models = self.models()
            model = _find_named(name, models) or _find_named(name, models, _without_case)
        return model

    def _known_models(self) -> list[NamedModel]:
        every = {**self._folder_models, **self._fixed}
        return [replace(one, pinned=True) if one.name in self._pinned else one for one in every.values()]

    def hub_model(self, name: str) -> NamedModel:
        """The model of this name on the hub, which is not added. Raises EngineError."""
        try:
            hub_name = hub.parse(name)
        except LoadError as error:
            raise EngineError(str(error), "model_unavailable") from None
        return NamedModel(str(hub_name), settle(f"{hub.PREFIX}{hub_name}", self._common, {}))

    def add(self, model: NamedModel) -> None:
        """Add a model, unless it is there. Raises FlagError if another one has its name."""
        owners = {name: one.name for one in self._fixed.values() for name in (one.name, *one.aliases)}
        for name in (model.name, *model.aliases):
            if owners.get(name, model.name) != model.name:
                raise FlagError(f"Two models are called {name}: {owners[name]} and {model.name}; rename one of them")
        self._fixed.setdefault(model.name, model)


def _without_hub_address(name: str) -> str:
    """A name on the hub as it is written here; any other name as it is."""
    try:
        return str(hub.parse(name))
    except LoadError:
        return name


def _without_case(name: str) -> str:
    """What names have in common that differ in case or in their Unicode normal form alone."""
    return normalize("NFD", normalize("NFD", name).casefold())


def _find_named(name: str, models: Sequence[NamedModel], form: Callable[[str], str] = str) -> NamedModel | None:
    """form: of names that is compared; an adapter's has to be the same."""

    def called(name: str) -> list[NamedModel]:
        return [model for model in models if form(name) in map(form, (model.name, *model.aliases))]

    matches, (base, _, adapter) = called(name), name.rpartition(":")
    if not matches and base:
        matches = [model for model in called(base) if adapter in model.config.lora]
    if not matches and ":" not in name:
        matches = [model for model in models if form(model.name).startswith(f"{form(name)}:")]
    return matches[0] if len(matches) == 1 else None


def in_words(models: Sequence[NamedModel], most: int = 20) -> str:
    names = [model.name for model in models]
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest if names else "none"


def _models_of_folder(folder: Path, common: EngineConfig) -> list[NamedModel]:
    """The models in a folder and in those inside it: GGUF files, by their names without part and ending, and folders
    of safetensors. A file's folder is in front of its name if another has the same."""
    subfolders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    files = files_of(folder, ("*.gguf", *(f"{escape(path.name)}/*.gguf" for path in subfolders)))
    paths = {path.name: path for path in subfolders if is_model(path)}
    for one in sorted(models_in(folder, files.values()), key=lambda one: one.files[0].path.count("/")):
        path = folder / one.files[0].path
        name = _PART.sub("", path.stem)
        paths[name if name not in paths else f"{one.folder or '.'}/{name}"] = path
    return [NamedModel(name, settle(path, common, {})) for name, path in sorted(paths.items())]


def _models_of_hub(common: EngineConfig) -> list[NamedModel]:
    """The models in the hub's cache that can be loaded, and those in this program's own cache folder."""
    folder = cache_folder()
    own_models = [
        replace(one, aliases=(demo.NAME,)) if one.path == folder / demo.FILE_NAME else one
        for one in (_models_of_folder(folder, common) if folder.is_dir() else ())
    ]
    cached_models = [one for one in local.models() if _is_supported(one)]
    return [*(NamedModel(one.name, settle(one.path, common, {})) for one in cached_models), *own_models]


@cache
def _is_supported(model: local.Local) -> bool:
    """Whether a model in the hub's cache is of a family that is supported."""
    try:
        load_weights(model.path)[1].close()
    except LoadError:
        return False
    return True


def _models_of_file(file: Path, common: EngineConfig) -> list[NamedModel]:
    """The models in a TOML file, one for each table. Raises FlagError."""
    at = f"--models {file}"
    tables = read_toml(at, file)
    tables.pop("server", None)  # flags, which the command line has read
    models = [_model(at, file.parent, name, table, common) for name, table in tables.items()]
    if not models:
        raise FlagError(f'{at}: has no models; write a table for each, as in [qwen3] with path = "qwen3.gguf"')
    return models


def _model(at: str, folder: Path, name: str, table: Any, common: EngineConfig) -> NamedModel:
    at = f"{at}: [{name}]"
    if not isinstance(table, Mapping):
        raise FlagError(f'{at}: a model is a table, as in [{name}] with path = "FILE.gguf"')
    keys = [*_KEYS, *(key for key in _SETTINGS if key not in _SOURCES)]
    for key in table:
        if (why := WITHOUT_EFFECT.get(f"--{key}")) is not None:
            note(f"note: {at}: {key} has no effect: {why}")
        elif key not in keys:
            raise FlagError(f"{at}: there is no setting {key}{advise(key, keys)}")
    path, hub_name = _value(at, table, "path", str), _value(at, table, "hf", str)
    if (path is None) == (hub_name is None):
        raise FlagError(f"{at}: needs either path, a file or folder, or hf, a name on the hub")
    if path is not None:
        source = str(where := folder / Path(path).expanduser())
        if not where.exists():
            hint = QUOTES if any(sign < " " for sign in path) else ""
            raise FlagError(f"{at}: path = {path!r}: there is no such file or folder{hint}")
    else:
        source = f"{hub.PREFIX}{hub_name}"
    aliases = _value(at, table, "aliases", list) or []
    if not all(isinstance(alias, str) for alias in aliases):
        raise FlagError(f"{at}: aliases must be an array of names")
    idle = _value(at, table, "idle-unload", (int, float))
    settings = {_SETTINGS[key]: value for key, value in table.items() if key in _SETTINGS and key not in _KEYS}
    try:
        if path is None:
            hub.parse(source)
        config = settle(source, common, settings)
    except LoadError as error:
        raise FlagError(f"{at}: {error}") from None
    except EngineError as error:
        raise FlagError(f"{at}: {in_flags(error)}") from None
    return NamedModel(name, config, tuple(aliases), bool(_value(at, table, "pinned", bool)), idle)


def _value(at: str, table: Mapping[str, Any], key: str, kind: Any) -> Any:
    value = table.get(key)
    if value is None or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
        return value
    words = {str: "text", list: "an array of names", bool: "true or false"}
    raise FlagError(f"{at}: {key} must be {words.get(kind, 'a number')}, not {value!r}")
