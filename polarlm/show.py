"""`polarlm show MODEL`: what a model's files say about it, without reading its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from polarlm import model_loaders
from polarlm.engine.cli.commands import note, with_flags
from polarlm.engine.config import EngineConfig, format_bytes, hub_setting, model_setting
from polarlm.engine.loading.checks import settle


@dataclass(frozen=True)
class ShowConfig:
    weights: str | None = model_setting()
    hf_repo: str | None = hub_setting()


GROUPS: Mapping[str, type] = {"Model": ShowConfig}


@with_flags(GROUPS, "polarlm show", "Show what a model's files say about it.")
def main(options: ShowConfig) -> None:
    path = settle(None, EngineConfig(weights=options.weights, hf_repo=options.hf_repo), {}).weights
    model = model_loaders.load(path, verbose=note)
    try:
        rows = _rows(model)
    finally:
        model.close()
    width = max(len(name) for name, _ in rows) + 2
    print("\n".join([model.name, *(f"  {name:{width}}{value}" for name, value in rows)]))


def _image_rows(model: model_loaders.Model) -> list[tuple[str, str]]:
    if model.vision_weights is None:
        return []
    parameters = sum(math.prod(model.vision_weights.shape(name)) for name in model.vision_weights.names())
    return [("images", f"read, by {parameters:,} parameters more")]


def _rows(model: model_loaders.Model) -> list[tuple[str, str]]:
    config, weights, template = model.config, model.weights, model.template
    attention = config.attention
    parameters = sum(math.prod(weights.shape(name)) for name in weights.names())
    chat = template.missing_note(model.name) or f"its own{', with reasoning' if template.tags else ''}"
    return [
        ("family", config.family),
        ("parameters", f"{parameters:,}"),
        ("weights", f"{model.dtype}, {format_bytes(sum(file.stat().st_size for file in weights.files()))}"),
        ("context", f"{config.max_context:,} tokens"),
        ("layers", f"{len(config.layers)}, {len(config.kv_attentions)} with keys and values"),
        ("heads", f"{attention.heads} for queries, {attention.kv_heads} for keys and values, of {attention.head_dim}"),
        *_image_rows(model),
        ("vocabulary", f"{config.vocab_size:,} tokens"),
        ("template", "none: it gives texts vectors" if config.is_encoder else chat),
        ("path", str(model.path)),
    ]
