"""Writes the tables of docs/cache-types.md, between their marks: bits of each type, and memory for typical models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from polarlm.engine import codecs, records
from polarlm.engine.config import EngineConfig
from polarlm.engine.records.fragments import Geometry
from polarlm.engine.state.cache_types import PRESETS
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.plan import format_bytes
from polarlm.engine.state.shapes import CacheShape
from scripts.make_quality_table import with_tables

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "cache-types.md"
BLOCK = EngineConfig().block_size
CONTEXT = 32_768
MEAN_BITS = 8

# Name → layers, KV heads, head dim of its configuration.
MODELS = {
    "SmolLM2 135M": (30, 3, 64),
    "Llama 3.2 1B": (16, 8, 64),
    "Llama 3.2 3B": (28, 8, 128),
    "Qwen2.5 7B": (28, 4, 128),
    "Llama 3.1 8B, Mistral 7B": (32, 8, 128),
    "Qwen3 8B": (36, 8, 128),
    "Llama 2 7B": (32, 32, 128),
    "Llama 3.1 70B": (80, 8, 128),
}


def bits_table() -> str:
    """A table of all codecs: their sides, their bits, and whether there is a CUDA kernel."""
    lines = ["| Type | Stores | bits/value, D = 128 | D = 64 | GPU |", "|---|---|---|---|---|"]
    for name in codecs.available():
        codec = codecs.get(name)
        sides = " and ".join(word for letter, word in (("k", "keys"), ("v", "values")) if letter in codec.serves)
        bits = [f"{codecs.bits_per_value(codec, BLOCK, head_dim):.3f}" for head_dim in (128, 64)]
        kernel = "yes" if records.record_of(codec, Geometry("k" not in codec.serves, BLOCK, 128)) else "no"
        lines.append(f"| `{name}` | {sides} | {' | '.join(bits)} | {kernel} |")
    return "\n".join(lines)


def shape_of(model: str, keys: str, values: str) -> CacheShape:
    """The shape of the cache of a model of MODELS on the CPU."""
    layers, kv_heads, head_dim = MODELS[model]
    mean_bits = 0 if keys == "f16" else MEAN_BITS
    layer = LayerShape(codecs.get(keys), codecs.get(values), kv_heads, head_dim, mean_bits)
    return CacheShape(BLOCK, (layer,) * layers)


def memory_table() -> str:
    """A table of the memory of a token and of a long sequence."""
    types = {"f16": ("f16", "f16"), **PRESETS}
    lines = [
        f"| Model | L, K, D | {' | '.join(types)} | {CONTEXT:,} tokens, f16 | balanced |",
        "|---" * (4 + len(types)) + "|",
    ]
    for model, (layers, kv_heads, head_dim) in MODELS.items():
        shapes = {name: shape_of(model, *sides) for name, sides in types.items()}
        tokens = [format_bytes(shape.bytes_per_token) for shape in shapes.values()]
        long = [format_bytes(CONTEXT * shapes[name].bytes_per_token) for name in ("f16", "balanced")]
        lines.append(f"| {model} | {layers}, {kv_heads}, {head_dim} | {' | '.join([*tokens, *long])} |")
    return "\n".join(lines)


TABLES: Mapping[Path, Mapping[str, Callable[[], str]]] = {DOCUMENT: {"bits": bits_table, "memory": memory_table}}


if __name__ == "__main__":
    for document, tables in TABLES.items():
        document.write_text(with_tables(document.read_text(encoding="utf-8"), tables), encoding="utf-8")
