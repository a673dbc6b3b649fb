"""The details of a model that Ollama's clients ask for: its files, its shape, its capabilities."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime, timezone
from math import prod
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from polarlm.model_loaders import LoadError, Model
from polarlm.model_loaders.config import Experts, ModelConfig
from polarlm.model_loaders.files.weights import WeightSource
from polarlm.server.reading.infill import infill_of

# The version of Ollama whose API this server has. Clients refuse older versions: Copilot in VS Code needs 0.6.4, which
# tells what a model can do, and Codex needs 0.13.4, which has Responses.
_OLLAMA = "0.14.3"
NEVER = "9999-12-31T23:59:59Z"  # the time at which a model is unloaded that stays


async def ollama_version(_request: Request) -> Response:
    """GET /api/version"""
    return JSONResponse({"version": _OLLAMA})


def list_entry(name: str, config: ModelConfig, weights: WeightSource, dtype: str, is_folder: bool) -> dict[str, Any]:
    """A model as an entry of a list. Its digest identifies it, but is not computed from its bytes."""
    status = [file.stat() for file in weights.files()]
    size = sum(one.st_size for one in status)
    modified_at = datetime.fromtimestamp(max((one.st_mtime for one in status), default=0), timezone.utc)
    identity = f"{name} {size} {modified_at.timestamp()}"
    return {
        "name": name,
        "model": name,
        "modified_at": utc(modified_at),
        "size": size,
        "digest": hashlib.sha256(identity.encode(errors="surrogatepass")).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "safetensors" if is_folder else "gguf",
            "family": config.family,
            "families": [config.family],
            "parameter_size": _short_count(_parameters(weights)),
            "quantization_level": dtype,
        },
    }


def show_response(model: Model, context: int, entry: dict[str, Any]) -> dict[str, Any]:
    """A model with its template, its shape and what it can do. entry: the model's entry in a list."""
    return {
        "modelfile": "",
        "parameters": "",
        "template": model.template.source,
        "modified_at": entry["modified_at"],
        "details": entry["details"],
        "model_info": _shape(model, context),
        "capabilities": _capabilities(model),
    }


def answer_line(path: str, model: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """A line of an answer at /api/chat or /api/generate. content: "content", its text, and perhaps other members."""
    head = {"model": model, "created_at": utc(datetime.now(timezone.utc))}
    if path == "/api/generate":
        return head | {("response" if name == "content" else name): value for name, value in content.items()}
    return head | {"message": {"role": "assistant", **content}}


def utc(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _capabilities(model: Model) -> list[str]:
    """What a model can do, in Ollama's words; "insert" is writing text before a suffix."""
    if model.config.is_encoder or model.pooling:
        return [] if model.config.scores_pairs else ["embedding"]
    try:
        reasons = model.template.tags is not None
    except LoadError:  # the template cannot run
        reasons = False
    optional = {
        "insert": infill_of(model.tokenizer) is not None,
        "vision": model.vision_encoder is not None,
        "thinking": reasons,
    }
    return ["completion", "tools", *(name for name, can in optional.items() if can)]


def _parameters(weights: WeightSource) -> int:
    shapes = map(weights.shape, weights.names())
    return sum(prod(shape) for shape in shapes if len(shape) > 1)


def _short_count(count: int) -> str:
    """A number of parameters as Ollama writes it, such as 134.5M."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)


def _shape(model: Model, context: int) -> dict[str, Any]:
    config = model.config
    shape = {
        "context_length": context,
        "embedding_length": config.hidden_size,
        "block_count": config.depth,
        "feed_forward_length": config.ffn.size,
        "attention.head_count": config.attention.heads,
        "attention.head_count_kv": config.attention.kv_heads,
        "vocab_size": len(model.vocabulary),
    }
    if isinstance(config.ffn, Experts):
        shape |= {"expert_count": config.ffn.count, "expert_used_count": config.ffn.top_k}
    general = {"general.architecture": config.family, "general.parameter_count": _parameters(model.weights)}
    return general | {f"{config.family}.{name}": value for name, value in shape.items()}
