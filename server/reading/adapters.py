"""Reads which adapter (LoRA) a request asks for: by the model's name, as at vLLM, or in llama-server's field `lora`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polarlm.engine import PromptOptions
from polarlm.server.reading.values import BadRequest, count, is_empty, number, wrong


def with_adapter(options: PromptOptions, body: Mapping[str, Any], adapters: Mapping[str, float]) -> PromptOptions:
    """The options with the adapter that a body names. adapters: the server's, with their scales. Raises BadRequest.

    "model" is the name of an adapter, by itself or after the model's name and a colon. "lora" lists numbers of adapters
    with their scales; of these at most one may be other than 0.
    """
    chosen = _listed(body.get("lora"), [*adapters])
    model = body.get("model")
    named = model.rpartition(":")[2] if isinstance(model, str) else ""
    if chosen is None:
        return replace(options, lora=named) if named in adapters else options
    name, scale = chosen
    if named in adapters and named != name:
        raise BadRequest("lora", f"model names the adapter {named}, and lora {name}: a request has one adapter")
    return replace(options, lora=name, lora_scale=scale / adapters[name])


def _listed(value: Any, names: list[str]) -> tuple[str, float] | None:
    """The adapter in llama-server's list, and its scale; None if it has none of a scale other than 0."""
    if is_empty(value):
        return None
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise wrong("lora", 'an array of objects such as {"id": 0, "scale": 1}', value)
    found: dict[str, float] = {}
    for index, one in enumerate(value):
        at = f"lora[{index}]"
        if not names:
            raise BadRequest(f"{at}.id", f"{at}.id: this server has no adapters: start it with --lora NAME=PATH")
        name = names[count(f"{at}.id", one.get("id"), 0, len(names) - 1)]
        if scale := number(f"{at}.scale", one.get("scale", 0)):
            found[name] = scale
    if len(found) > 1:
        raise BadRequest("lora", f"lora asks for {' and '.join(found)}, but a request has one adapter")
    return next(iter(found.items()), None)
