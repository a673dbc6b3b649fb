"""`polarlm verify REQUEST RESPONSE`: computes an answer again, which a server with `--replayable` has given."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import MISSING, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from polarlm.engine import EngineError
from polarlm.engine.cli.commands import with_flags
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.config import EngineConfig, setting
from polarlm.engine.loading.checks import settle
from polarlm.model_loaders import first_model
from polarlm.server.batch import import_room

_PATHS = {"chat.completion": "/v1/chat/completions", "text_completion": "/v1/completions"}
# The parts of `Engine.fingerprint`, and what to do if one differs.
_PARTS = {
    "version": "take that version",
    "model": "name that model's file",
    "cache type": "choose it by --cache-type",
    "input bits": "choose them by --input-bits",
    "block size": "it is a setting of the library alone",
    "encoding": "it follows from key_conditioning, which is a setting of the library alone",
}


@dataclass(frozen=True)
class VerifyConfig:
    request: str = setting(MISSING, "REQUEST", help="the JSON that was sent to /v1/chat/completions or /v1/completions")
    response: str = setting(MISSING, "RESPONSE", help="the JSON that a server with --replayable answered, not streamed")


GROUPS: Mapping[str, type] = {"Verify": VerifyConfig, "Model": EngineConfig}


@with_flags(GROUPS, "polarlm verify", "Compute an answer of a server with --replayable again.")
def main(verify: VerifyConfig, model: EngineConfig) -> int:
    """Returns 1 if the answer is another one."""
    request, response = _read(verify.request), _read(verify.response)
    path = _PATHS.get(str(response.get("object")))
    if path is None:
        raise FlagError(f"{verify.response}: this is no whole answer of {' or '.join(_PATHS.values())}")
    if not response.get("system_fingerprint"):
        raise FlagError(
            f"{verify.response}: it has no system_fingerprint, as answers of polarlm serve --replayable have"
        )
    choices = response.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise FlagError(f"{verify.response}: its choices are no array of objects, as answers have")
    model = settle(None, model, {})
    model = replace(model, weights=model.weights or first_model.remembered_name(), replayable=True)
    found = _answer(settle(None, model, {}), path, {**request, "stream": False})
    if why := _difference(found, response):
        print(f"{verify.response}: {why}")
        return 1
    print(f"The same answer: {found['system_fingerprint']}")
    return 0


def _read(name: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(name).expanduser().read_bytes())
    except OSError as error:
        raise FlagError(f"{name}: {error.strerror}") from None
    except ValueError as error:
        raise FlagError(f"{name} is not JSON: {error}") from None
    except RecursionError:
        raise FlagError(f"{name} is nested too deeply") from None
    if not isinstance(content, dict):
        raise FlagError(f"{name}: a JSON object is needed")
    return content


def _answer(model: EngineConfig, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request, as a batch of one line. Raises EngineError."""
    serving, lines = import_room("serving"), import_room("http.openai.lines")
    try:
        content = json.dumps({"custom_id": "1", "method": "POST", "url": path, "body": body})
    except RecursionError:  # with what a line has around it
        raise EngineError("the request is nested too deeply") from None
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "requests"), Path(folder, "answers")
        source.write_text(content)
        with lines.LineFiles(source, output) as files:
            serving.answer_files(model, files, nullcontext(lambda text: None))
        answer = json.loads(output.read_bytes())
    if answer["error"] or answer["response"]["status_code"] != 200:
        raise EngineError((answer["error"] or answer["response"]["body"]["error"])["message"])
    return dict(answer["response"]["body"])


def _difference(found: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """Return a sentence about where a given answer differs from the one found here; None if it does not."""
    here, there = (str(one["system_fingerprint"]).split(":") for one in (found, given))
    for (part, advice), (ours, theirs) in zip(_PARTS.items(), zip_longest(here, there, fillvalue=""), strict=False):
        if ours != theirs:
            return f"it was answered with another {part}, {theirs or 'none'} and not {ours or 'none'}: {advice}"
    if here != there:
        return f"its system_fingerprint was changed: it is {found['system_fingerprint']}"
    if len(found["choices"]) != len(given["choices"]):
        return f"it has {len(given['choices'])} choices, and here {len(found['choices'])}"
    for number, pair in enumerate(zip(found["choices"], given["choices"], strict=True)):
        choice, other = map(_without_ids, pair)
        if choice["replay_digest"] != other.get("replay_digest"):
            said = choice.get("message", choice.get("text"))
            return f"choice {number} is not the answer computed here, which is {said!r}"
        for name in {**choice, **other}:
            if choice.get(name) != other.get(name):
                return f"choice {number} was changed: its digest is right, and its {name} is {choice.get(name)!r}"
    if (counts := _counts(found)) != _counts(given):
        return f"its usage was changed: it is {counts}"
    return None


def _without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice without the ids of its calls, which are made up each time."""
    message = choice.get("message")
    if not isinstance(message, dict) or not isinstance(message.get("tool_calls"), list):
        return choice
    calls = [{**call, "id": None} if isinstance(call, dict) else call for call in message["tool_calls"]]
    return {**choice, "message": {**message, "tool_calls": calls}}


def _counts(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The counts in an answer's usage, without those of cached and of drafted tokens, which depend on the server."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return {}
    details = usage.get("completion_tokens_details")
    fields = {**usage, **(details if isinstance(details, dict) else {})}
    names = ("prompt_tokens", "completion_tokens", "total_tokens", "reasoning_tokens")
    return {name: fields[name] for name in names if name in fields}
