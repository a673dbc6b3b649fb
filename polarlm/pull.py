"""`polarlm pull NAME`: downloads a model from the Hugging Face hub ahead of its first use, and prepares it if asked; or
an adapter, a draft head, or a pack.

What is there already is checked, and downloaded again if it is damaged.

Standard output gets the path. Exit codes: 0; 2 for a bad flag or what cannot be fetched; 130 after Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from polarlm import model_loaders
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
        help="also load the model once, with these flags: its KV cache is fitted and its kernels are compiled, so that "
        "the first start takes no longer than later ones",
    )


GROUPS: Mapping[str, type] = {"Model": EngineConfig, "Download": PullConfig}


# How to use what the hub has; {} is its name.
_USES: Mapping[str, str] = {
    "model": "To talk to it: polarlm chat {}",
    "adapter": "To use it: polarlm chat MODEL --lora hf:{}",
    "head": "To use it: polarlm chat MODEL --spec-type eagle3 (or assistant) --model-draft hf:{}",
    "pack": "To use it: polarlm chat MODEL --pack hf:{}",
}


@with_flags(GROUPS, "polarlm pull", "Download a model, an adapter, a draft head or a pack from the Hugging Face hub.")
def main(engine_config: EngineConfig, options: PullConfig) -> None:
    from polarlm.engine import Engine
    from polarlm.engine.backends.select import select
    from polarlm.engine.loading.placement.request import fit_check
    from polarlm.model_loaders import hub

    config = settle(None, engine_config, {})
    if config.weights is None:
        raise FlagError("MODEL is missing: give user/repo of the Hugging Face hub, or user/repo:Q4_K_M")
    name = None if config.weights == demo.NAME else hub.parse(config.weights)
    if name is None:
        path, kind = model_loaders.locate(config.weights, verbose=note), "model"
    else:
        ops, _ = select(config.device, config.threads)
        path, kind = hub.pull(name, fit_check(config, ops), note)
    if name is not None and path.suffix == ".gguf" and name.quantization is None:
        name = replace(name, quantization=hub.quantization_of(path))
    if options.prepare and kind != "model":
        raise FlagError(f"--prepare is for models, and {name} is of the kind {kind}: leave --prepare out")
    if options.prepare:
        config = replace(config, weights=str(path))
        with Engine.load(config=config, verbose=lambda sentence: note(note_in_flags(sentence))) as engine:
            note(engine.fit_line())
    shown = name or demo.NAME
    note(f"{shown} takes {format_bytes(_size(path))} on the disk. {_USES[kind].format(shown)}")
    print(path)


def _size(path: Path) -> int:
    """Bytes of the files; a folder of safetensors may also contain GGUF files, which do not count."""
    from polarlm.model_loaders.files.gguf_file import part_paths

    files = part_paths(path) if path.is_file() else [file for file in path.rglob("*") if file.suffix != ".gguf"]
    return sum(file.stat().st_size for file in files if file.is_file())
