"""Writes docs/http-fields.md, the table of a request's fields, from `server.reading.fields`."""

import json
from pathlib import Path

from polarlm.server.reading.fields import FIELDS, RULES, Field

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "http-fields.md"
_BEGINNING = """\
# Fields of a request

How this server treats every field that OpenAI, llama-server or vLLM define for a request to `/v1/chat/completions`
or `/v1/completions`, or on the [socket](socket-protocol.md). `python -m scripts.make_http_fields` writes this file.

- *Honoured*: it does what its name says.
- *Harmless*: the answer is the same with it and without it, and it is ignored.
- *Ignored*: a wish that does not change what the answer means. Over HTTP, a warning in the header `X-PolarLM-Warning`.
- *Refused*: a 400 names it, unless its value asks for nothing.

Fields that none of the three defines are ignored: clients send names of their own. Over HTTP an answer's header
`X-PolarLM-Warning` names them ([api.md](api.md)). `null`, `""`, `[]` and `{}` ask for nothing, here and in other APIs,
since typed clients send them for all fields; but an empty prompt is one, `{}` as a schema is any JSON, and `[]` as
`dry_sequence_breakers` is none. Some fields have more such values. Numbers may be in quotes, and whole ones written as
5.0.
"""


def document() -> str:
    """The whole file."""
    return "\n".join(
        [
            _BEGINNING,
            *_table("Honoured", "What it does, and its default"),
            *_table("Harmless", "Why it changes nothing"),
            *_table("Ignored", "Why"),
            *_table("Refused", "Why it is refused"),
        ]
    )


def _table(standing: str, about: str) -> list[str]:
    fields = [field for field in FIELDS.values() if field.standing == standing.lower()]
    head = f"## {standing}\n\n| Field | Known to | {about} | Values that ask for nothing |\n|---|---|---|---|"
    return [head, *(f"| `{one.name}` | {one.apis} | {one.says} | {_neutral(one)} |" for one in fields), ""]


def _neutral(field: Field) -> str:
    rule = RULES.get(field.name)
    return rule.text if rule else " or ".join(f"`{json.dumps(value)}`" for value in field.neutral)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
