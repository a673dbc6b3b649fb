"""`polarlm pull MODEL`: downloads a model from the Hugging Face hub ahead of its first use, and prepares it if asked.

What is there already is checked, and downloaded again if it is damaged.

Standard output gets the model's path. Exit codes: 0; 2 for a bad flag or a model that cannot be fetched; 130 after
Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from polarlm.engine.cli.commands import note, note_in_flags, with_flags
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.config import EngineConfig, format_bytes, setting
from polarlm.engine.loading.checks import settle
from polarlm.model_loaders import demo


@dataclass(frozen=True)
class PullConfig:
    prepare: bool = setting(
        False,
        "--prepare",
        help="also load the model once, with these flags: its KV cache is fitted, its kernels are compiled and, with "
        "--tile-cache, its weights packed, so that the first start takes no longer than later ones",
    )


GROUPS: Mapping[str, type] = {"Model": EngineConfig, "Download": PullConfig}


@with_flags(GROUPS, "polarlm pull", "Download a model from the Hugging Face hub.")
def main(engine_config: EngineConfig, options: PullConfig) -> None:
    from polarlm.engine import Engine
    from polarlm.engine.loading.need import fetch_model
    from polarlm.model_loaders import hub

    config = settle(None, engine_config, {})
    if config.weights is None:
        raise FlagError("MODEL is missing: give user/repo of the Hugging Face hub, or user/repo:Q4_K_M")
    name = None if config.weights == demo.NAME else hub.parse(config.weights)
    config = replace(config, weights=demo.NAME if name is None else f"{hub.PREFIX}{name}")
    config = fetch_model(config, note, verify=True)
    path = Path(str(config.weights))
    if name is not None and path.is_file() and name.quantization is None:
        name = replace(name, quantization=hub.quantization_of(path))
    if options.prepare:
        with Engine.load(config=config, verbose=lambda sentence: note(note_in_flags(sentence))) as engine:
            note(engine.fit_line())
    shown = name or demo.NAME
    note(f"{shown} takes {format_bytes(_size(path))} on the disk. To talk to it: polarlm chat {shown}")
    print(path)


def _size(path: Path) -> int:
    """Bytes of the model's files; a folder of safetensors may also contain GGUF files, which do not count."""
    from polarlm.model_loaders.files.gguf_file import part_paths

    files = part_paths(path) if path.is_file() else [file for file in path.rglob("*") if file.suffix != ".gguf"]
    return sum(file.stat().st_size for file in files if file.is_file())
