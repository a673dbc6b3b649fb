"""The grammar of an answer of messages in channels that may call tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.model_loaders.chat.channels import Channels
from polarlm.server.answers.call_grammar import Function, literal, schema_of

CONSTRAIN = "<|constrain|>"  # models write it before the type of arguments, templates do not show it


def channel_grammar(
    channels: Channels,
    format: CallFormat,
    functions: Sequence[Function],
    control: Mapping[str, int],
    *,
    calls: Literal["may", "must", "none"],
    schema: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of an answer that may, must or must not call one of `functions`: any messages, then a call or text.

    control: name → id of control tokens. Models name the function before the channel, as their template does, or after
    it. schema: of the text, prepared for %json.
    """
    channel = format.middle[0].removeprefix(channels.channel).split(maxsplit=1)[0]  # the channel of calls
    last = {"may": "(call | said)", "must": "call", "none": "said"}[calls]
    said = [literal(channels.header(name), control) for name in (channels.reasoning, channel, channels.final)]
    lines = [
        "%llguidance {}",
        f"start: (message {literal(channels.between, control)})* {last}",
        f"message: ({' | '.join(said[:2])}) TEXT",
        f"said: {said[2]} {'TEXT' if schema is None else 'json'}",
        *([] if schema is None else [f"json: %json {json.dumps(schema)}"]),
        "TEXT: /(?s:.*)/",
    ]
    if calls == "none":
        return "\n".join(lines) + "\n"
    kinds = [f"{CONSTRAIN}json", "json"] if CONSTRAIN in control else ["json"]
    kind = " | ".join(literal(f" {kind}{channels.message}", control) for kind in kinds)
    before, after = literal(f"{channels.channel}{channel}", control), literal(format.opening, control)
    lines += [f"kind: {kind}", "call: " + " | ".join(f"call{number}" for number in range(len(functions)))]
    for number, function in enumerate(functions):
        name = f"{after} {literal(function.name, control)}"
        lines.append(f"call{number}: ({name} {before} | {before} {name}) kind arguments{number}")
        lines.append(f"arguments{number}: %json {json.dumps(schema_of(function, format.separators))}")
    return "\n".join(lines) + "\n"
