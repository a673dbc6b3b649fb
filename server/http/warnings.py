"""What of a request is not done as it asks: said once in its response, by a field and a header, and once in the log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from starlette.responses import Response

from polarlm.server.http.streams import Event, EventStream
from polarlm.server.running import journal

HEADER = "X-PolarLM-Warning"
FIELD = "warnings"  # of the object in a response's body: an array of sentences

_MOST = 6  # sentences in a header, whose size clients limit
_LONGEST = 200  # characters of each
_UNSAFE = re.compile(r"[^ -~]")  # characters that a header cannot have


def warn(response: Response, warnings: Iterable[str]) -> Response:
    """`response` with the sentences in its header and, if its body is a JSON object, in a field of that; they are also
    added to the request's line in the log. A stream has the field by `add_to_stream`."""
    if not (sentences := list(dict.fromkeys(warnings))):
        return response
    texts = [_UNSAFE.sub("?", sentence)[:_LONGEST] for sentence in sentences[:_MOST]]
    more = [f"and {len(sentences) - _MOST} more"] if len(sentences) > _MOST else []
    response.headers[HEADER] = "; ".join([*texts, *more])
    if entry := journal.current():
        entry.warnings = sentences
    if not isinstance(response, EventStream) and bytes(response.body[-1:]) == b"}":
        # The body is not parsed again: it may be long.
        comma = b"" if bytes(response.body) == b"{}" else b","
        response.body = bytes(response.body[:-1]) + comma + f'"{FIELD}":{json.dumps(sentences)}}}'.encode()
        response.headers["content-length"] = str(len(response.body))
    return response


def warnings_of_items(field: str, warnings: Mapping[int, str]) -> list[str]:
    """Sentences about items of an array, by their indices: each sentence once, after the paths of its items."""
    places: dict[str, list[str]] = {}
    for number, sentence in warnings.items():
        places.setdefault(sentence, []).append(f"{field}[{number}]")
    return [
        f"{', '.join(each[:_MOST])}{f' and {len(each) - _MOST} more' if len(each) > _MOST else ''}: {sentence}"
        for sentence, each in places.items()
    ]


def add_to_stream(events: Sequence[Event], warnings: Iterable[str]) -> Sequence[Event]:
    """The last events of a stream, with the sentences in the last one that has a usage, or else in the last object; in
    OpenAI's Responses that is the response in it."""
    objects = [event for event in events if event is not None]
    if (sentences := list(dict.fromkeys(warnings))) and objects:
        last = next((event for event in reversed(objects) if event.get("usage")), objects[-1])
        response = last.get("response")
        (response if isinstance(response, dict) else last)[FIELD] = sentences
    return events
