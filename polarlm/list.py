"""`polarlm list`: the models on this machine, in the hub's cache and in this program's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from polarlm.engine.cli.commands import columns, note, with_flags
from polarlm.engine.config import format_bytes, setting
from polarlm.model_loaders import demo
from polarlm.model_loaders.user_dirs import cache_folder


@dataclass(frozen=True)
class ListConfig:
    json: bool = setting(False, "--json", help="print names, sizes and paths as JSON")


GROUPS: Mapping[str, type] = {"List": ListConfig}


@with_flags(GROUPS, "polarlm list", "List the models on this machine, by name.")
def main(options: ListConfig) -> None:
    models = local_models()
    if options.json:
        keys = "name", "bytes", "path", "damaged"
        print(json.dumps([dict(zip(keys, one, strict=True)) for one in models], indent=1, default=str))
    elif not models:
        note("There are no models here yet: polarlm pull USER/REPO downloads one of the Hugging Face hub.")
    else:
        rows = [
            [name, format_bytes(size), f"damaged: polarlm pull {name}" if is_damaged else _date(path)]
            for name, size, path, is_damaged in models
        ]
        print("\n".join(columns([["model", "size", "since"], *rows])))


def local_models() -> list[tuple[str, int, Path, bool]]:
    """(name, bytes, path, whether it is damaged) of each model that commands take by its name, and of the demonstration
    model."""
    from polarlm.model_loaders.hub import local

    models = [(one.name, one.bytes, one.path, one.is_damaged()) for one in local.models()]
    if (file := cache_folder() / demo.FILE_NAME).is_file():
        models.append((demo.NAME, file.stat().st_size, file, False))
    return models


def _date(path: Path) -> str:
    return datetime.fromtimestamp(path.resolve().stat().st_mtime).strftime("%Y-%m-%d")
