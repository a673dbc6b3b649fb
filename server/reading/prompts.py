"""Reads the prompt of a request from JSON into an engine's Prompt and PromptOptions."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polarlm.engine import PromptOptions
from polarlm.engine.requests.prompts import Prompt
from polarlm.model_loaders import Model
from polarlm.server.reading.fields import duplicate_warning
from polarlm.server.reading.messages import read_messages
from polarlm.server.reading.tools import Tools, check_depth
from polarlm.server.reading.values import (
    LARGEST,
    BadRequest,
    FieldWarnings,
    array,
    check_at_most,
    count,
    flag,
    is_empty,
    is_number,
    mapping,
    number,
    text,
    wrong_value,
)

MOST_SALT = 1024  # characters
MOST_VARIABLES = 4096  # characters of all variables of a template as JSON
_CUTS = {"END": True, "NONE": False}  # words of Cohere's; others would leave the beginning out
_LONGEST_EFFORT = 32  # characters: a word, such as "high"


@dataclass(frozen=True)
class ModelInfo:
    model: Model
    name: str  # what answers call the model, with the request's adapter, if it has one
    parse_special: bool  # whether names of control tokens in a raw prompt become these tokens
    tells_cached: bool  # whether clients learn how many tokens of a prompt were cached
    context: int  # tokens of a prompt and its answer together
    reads_images: bool = False
    fingerprint: str = ""  # see `Engine.fingerprint`
    lora: str = ""  # the request's adapter; empty for none
    lora_scale: float = 1.0


def read_prompt(
    body: Mapping[str, Any],
    takes: Collection[str] = ("messages", "prompt"),
    field_warnings: FieldWarnings | None = None,
    *,
    reads_images: bool,
) -> Prompt:
    """The prompt under one of the names in `takes`. field_warnings, reads_images: see `read_messages`. Raises
    BadRequest."""
    field_warnings = [] if field_warnings is None else field_warnings
    name = choose_field(body, takes)
    field_warnings += [
        (other, duplicate_warning(name, other))
        for other in ("messages", "prompt")
        if other not in takes and other in body
    ]
    if name == "messages":
        return read_messages(body["messages"], field_warnings, reads_images=reads_images)
    (prompt,) = read_prompts(name, body[name], 1)
    return prompt


def choose_field(body: Mapping[str, Any], names: Collection[str]) -> str:
    """Which of `names` a body has; one with an empty value counts if it is the only one. Raises BadRequest."""
    present = [name for name in names if body.get(name) is not None]
    nonempty = [name for name in present if not is_empty(body[name])] or present
    if len(nonempty) == 1:
        return nonempty[0]
    sentence = f"give either {' or '.join(names)}, not both" if nonempty else f"{' or '.join(names)} is missing"
    raise BadRequest(next(iter(names)), sentence)


def spelling(body: Mapping[str, Any], names: Sequence[str], field_warnings: FieldWarnings) -> str:
    """Which of several spellings of a field counts in a body: the first one with a value that is not empty.
    field_warnings: gets a sentence for each other spelling with another value."""
    present = [name for name in names if body.get(name) is not None]
    first, *others = [name for name in present if not is_empty(body[name])] or present or names
    field_warnings += [
        (other, duplicate_warning(first, other)) for other in others if other in body and body[other] != body[first]
    ]
    return first


def read_truncate(body: Mapping[str, Any], default: bool) -> bool:
    """Whether a text that is too long is cut, by the fields of Ollama, Text Embeddings Inference and Cohere, or of
    Voyage and Jina. Raises BadRequest."""
    values = [(name, body[name]) for name in ("truncate", "truncation") if body.get(name) is not None]
    words = {name: _CUTS.get(value, value) if isinstance(value, str) else value for name, value in values}
    return all(flag(name, value) for name, value in words.items()) if values else default


def read_options(body: Mapping[str, Any], info: ModelInfo, tools: Tools | None = None) -> PromptOptions:
    """body: of fields that ask for something."""
    return PromptOptions(
        parse_special=flag("parse_special", body.get("parse_special", info.parse_special)),
        lora=info.lora,
        lora_scale=info.lora_scale,
        cache_prompt=flag("cache_prompt", body.get("cache_prompt", True)),
        cache_salt=read_salt(body.get("cache_salt")),
        priority=count("priority", body.get("priority", 0), -(2**31), 2**31 - 1),
        replayable=flag("replayable", body.get("replayable") or False),
        pack=text("pack", body["pack"]) if body.get("pack") is not None else "",
        tools=() if tools is None else tools.all,
        template_variables=_template_variables(body.get("chat_template_kwargs"), body.get("reasoning_effort")),
    )


def read_vector_options(body: Mapping[str, Any], *, truncates: bool = False) -> dict[str, Any]:
    """`dimensions`, `prompt_name`, and `truncate`, whose default is `truncates`, of an embedding. Raises BadRequest."""
    dimensions, name = body.get("dimensions"), body.get("prompt_name")
    return {
        "prompt_name": None if name is None else text("prompt_name", name),
        "dimensions": None if dimensions in (None, 0, -1) else count("dimensions", dimensions, 1, LARGEST),
        "truncate": read_truncate(body, truncates),
    }


def read_continues(body: Mapping[str, Any], prompt: Prompt) -> bool:
    """Whether the answer continues the last message, unless a field of vLLM's says otherwise. Raises BadRequest."""
    meanings = {"continue_final_message": True, "add_generation_prompt": False}
    continues = {
        name: flag(name, body[name]) is meaning for name, meaning in meanings.items() if body.get(name) is not None
    }
    if len(set(continues.values())) > 1:
        sentence = "add_generation_prompt asks for a new turn if it is true, continue_final_message if it is false"
        raise BadRequest("continue_final_message", f"{sentence}: leave one of them out")
    last: Any = prompt[-1] if prompt else None
    is_continued = isinstance(last, dict) and last["role"] == "assistant" and not last.get("tool_calls")
    # and no result that went to its call
    is_continued = is_continued and body["messages"][-1].get("role") == "assistant"
    if isinstance(last, dict) and not is_continued and any(continues.values()):
        name = next(iter(continues))
        raise BadRequest(name, f"{name} asks to continue the last message, which is not a text of the assistant's")
    return is_continued and len(prompt) > 1 and all(continues.values())


_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")


def _template_variables(value: Any, effort: Any) -> dict[str, Any]:
    """Variables of the model's template: the ones in `value`, and the ones that an effort of reasoning implies."""
    field = "chat_template_kwargs"
    variables: dict[str, Any] = {}
    if effort is not None:
        effort = text("reasoning_effort", effort, _LONGEST_EFFORT)
        variables = {"enable_thinking": effort != "none", "reasoning_effort": effort}
    if value is None:
        return variables
    for name in mapping(field, value, 'an object such as {"enable_thinking": false}'):
        if name in _OWN_VARIABLES:
            raise BadRequest(f"{field}.{name}", f"{field}.{name} cannot be set: the server gives it its value")
    check_depth(field, value)
    json_text = json.dumps(value, ensure_ascii=False)
    check_at_most(MOST_VARIABLES, field, len(json_text), "characters")
    return variables | {name: part for name, part in value.items() if part is not None}


def read_salt(value: Any) -> str:
    return "" if value is None else text("cache_salt", value, MOST_SALT)


def read_prompts(field: str, value: Any, most: int) -> list[Prompt]:
    """One prompt, or an array of 1 to `most`: strings, arrays of ids and strings, and {"prompt_string": string}. An
    array that contains a token id is one prompt. Raises BadRequest."""
    if not isinstance(value, list) or any(map(is_number, value)):
        return [_raw_prompt(field, value)]
    if not value:
        raise wrong_value(field, "a string, an array of token ids, or an array of several prompts", value)
    check_at_most(most, field, len(value), "prompts")
    return [_raw_prompt(field if len(value) == 1 else f"{field}[{index}]", one) for index, one in enumerate(value)]


def _raw_prompt(field: str, value: Any) -> str | list[int] | list[int | str]:
    if isinstance(value, dict):
        if value.get("multimodal_data"):
            raise BadRequest(f"{field}.multimodal_data", f"{field}.multimodal_data: images are taken in messages alone")
        return text(f"{field}.prompt_string", value.get("prompt_string"))
    if isinstance(value, str):
        return text(field, value)
    parts = array(field, value, "a string or an array of token ids", 1)
    places = ((f"{field}[{index}]", part) for index, part in enumerate(parts))
    return [text(at, part) if isinstance(part, str) else count(at, part, 0, LARGEST) for at, part in places]


def read_adapter(
    body: Mapping[str, Any], adapters: Mapping[str, float], numbers: Mapping[int, str]
) -> tuple[str, float]:
    """The adapter that a body names, and a factor on its scale: in "model", by itself or after the model's name and a
    colon, or in "lora", by number; ("", 1) if it names none. adapters: the server's, with their scales. Raises
    BadRequest."""
    by_number, scale = _read_lora(body.get("lora"), numbers)
    name = adapter_name(body)
    if name in adapters and by_number not in ("", name):
        raise BadRequest("lora", f"model names the adapter {name}, and lora {by_number}: a request has one adapter")
    if by_number:
        return by_number, scale / adapters[by_number]
    return (name if name in adapters else ""), 1.0


def adapter_name(body: Mapping[str, Any]) -> str:
    """What "model" names an adapter by, if it does."""
    model = body.get("model")
    return model.rpartition(":")[2] if isinstance(model, str) else ""


def _read_lora(value: Any, names: Mapping[int, str]) -> tuple[str, float]:
    """The adapter in llama-server's list, and its scale; ("", 0) if none has a scale other than 0."""
    if is_empty(value):
        return "", 0.0
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise wrong_value("lora", 'an array of objects such as {"id": 0, "scale": 1}', value)
    scales: dict[str, float] = {}
    for index, one in enumerate(value):
        at = f"lora[{index}]"
        if not names:
            raise BadRequest(f"{at}.id", f"{at}.id: this server has no adapters: start it with --lora NAME=PATH")
        if (name := names.get(count(f"{at}.id", one.get("id"), 0, max(names)))) is None:
            raise BadRequest(f"{at}.id", f"{at}.id is that of an adapter that was unloaded: GET /lora-adapters")
        if scale := number(f"{at}.scale", 0 if one.get("scale") is None else one["scale"]):
            scales[name] = scale
    if len(scales) > 1:
        raise BadRequest("lora", f"lora asks for {' and '.join(scales)}, but a request has one adapter")
    return next(iter(scales.items()), ("", 0.0))
