"""`polarlm rm MODEL…`: removes models from the hub's cache, and what was downloaded of models without becoming one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path

from polarlm.engine.cli.commands import note, with_flags
from polarlm.engine.config import format_bytes, setting
from polarlm.engine.errors import EngineError
from polarlm.model_loaders import LoadError, demo, first_model
from polarlm.model_loaders.user_dirs import cache_folder


@dataclass(frozen=True)
class RemoveConfig:
    names: tuple[str, ...] = setting(
        MISSING, "MODEL", help="names as polarlm list shows them; user/repo removes all that is here of a repository"
    )


_NOT_HERE = "{} is not on this machine: polarlm list shows what is"


GROUPS: Mapping[str, type] = {"Remove": RemoveConfig}


@with_flags(GROUPS, "polarlm rm", "Remove models from this machine.")
def main(options: RemoveConfig) -> None:
    for name in options.names:
        try:
            size = _remove(name)
        except OSError as error:
            raise EngineError(f"{name} cannot be removed: {error.strerror or error}", "storage") from None
        first_model.forget(name)
        note(f"{name} is removed: {format_bytes(size)}.")


def _remove(name: str) -> int:
    """Removes a model, and returns its bytes. Raises EngineError, LoadError or OSError."""
    if name == demo.NAME and (file := cache_folder() / demo.FILE_NAME).is_file():
        size = file.stat().st_size
        file.unlink()
        return size
    from polarlm.model_loaders import hub
    from polarlm.model_loaders.hub import local
    from polarlm.model_loaders.hub.client import Client

    try:
        hub_name = hub.parse(name)
    except LoadError:
        raise EngineError(_NOT_HERE.format(name), "model_unavailable") from None
    folder = Client().repo_folder(hub_name.repo)
    if not folder.is_dir():
        raise EngineError(_NOT_HERE.format(name), "model_unavailable")
    models = [one for one in local.models() if one.name.partition(":")[0] == hub_name.repo]
    models_to_remove = [one for one in models if hub_name.quantization is None or one.name == str(hub_name)]
    if not models_to_remove and hub_name.quantization is not None:
        names = ", ".join(one.name for one in models) or "none that is complete"
        raise EngineError(f"{name} is not on this machine; of {hub_name.repo} there is {names}", "model_unavailable")
    if len(models_to_remove) == len(models):
        size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_symlink() and file.is_file())
        shutil.rmtree(folder)
        return size
    return sum(_unlink(file, folder) for one in models_to_remove for file in one.files)


def _unlink(file: Path, folder: Path) -> int:
    """Removes a file of a snapshot, and its content unless another file of the repository has the same."""
    content, size = file.resolve(), file.stat().st_size
    file.unlink()
    if content != file and not any(other.resolve() == content for other in (folder / "snapshots").rglob("*")):
        content.unlink(missing_ok=True)
    return size
