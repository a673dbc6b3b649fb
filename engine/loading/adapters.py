"""Reads the adapters (LoRA) that settings name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from polarlm import model_loaders
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.model.adapters import Adapters, Loaded
from polarlm.model_loaders import hub
from polarlm.model_loaders.adapters import read_adapter

_NAME = re.compile(r"\w[\w.-]*")
_SCALE = re.compile(r"(?P<path>.+):(?P<scale>-?(\d+\.?\d*|\.\d+))")


def read_adapters(
    config: EngineConfig, source: model_loaders.Model, say: Callable[[str], None] = lambda sentence: None
) -> Adapters:
    """Return the adapters that `config` names, for the model `source`. Raises EngineError."""
    if config.lora and source.config.is_encoder:
        raise EngineError(f"{source.name} is an embedding model, which takes no adapters", settings=("lora",))
    found = {}
    for name, text in config.lora.items():
        path, scale = parsed(text)
        try:
            where = hub.fetch_adapter(hub.parse(path), say) if path.startswith(hub.PREFIX) else Path(path).expanduser()
            if not where.exists():
                raise EngineError(f"lora={name}: {where} does not exist; give a folder of peft, or a GGUF file")
            adapter = read_adapter(where, source.config, is_gguf=source.path.is_file())
        except model_loaders.LoadError as error:
            raise EngineError(str(error), "model_unavailable", ("lora",)) from error
        found[name] = Loaded(adapter, scale)
        rank = max(change.rank for change in adapter.changes.values())
        say(f"Adapter {name}: rank {rank}, {len(adapter.changes)} matrices" + (f", scale {scale:g}" * (scale != 1)))
    return Adapters(found)


def parsed(text: str) -> tuple[str, float]:
    """Return the path and the scale in PATH[:SCALE]. A path that exists is one as a whole."""
    match = _SCALE.fullmatch(text)
    if match is None or Path(text).expanduser().exists():
        return text, 1.0
    return match["path"], float(match["scale"])


def check_names(config: EngineConfig) -> None:
    """Raises EngineError for a name that no request could give."""
    for name, path in config.lora.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise EngineError(
                f"lora={name}: give the adapter a name of letters, digits, dots and dashes, as in NAME=PATH",
                settings=("lora",),
            )
        if not isinstance(path, str) or not path:
            raise EngineError(f"lora={name}: give the path of a folder of peft, or of a GGUF file", settings=("lora",))
    if config.lora_merge and not config.lora:
        raise EngineError("lora_merge=True: there is no adapter to merge; give one (lora)", settings=("lora_merge",))
