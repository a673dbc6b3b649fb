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
- *Refused*: a 400 names it, unless its value has no effect.

Fields that none of the three defines are ignored: clients send names of their own. Over HTTP an answer's header
`X-PolarLM-Warning` names them ([api.md](api.md)). `null` stands for the default everywhere. Whole numbers may be
written as 5.0.
"""


def document() -> str:
    """The whole file."""
    return "\n".join(
        [
            _BEGINNING,
            "## Honoured\n\n| Field | Known to | What it does, and its default |\n|---|---|---|",
            *(f"| `{field.name}` | {field.apis} | {field.says} |" for field in _of("honoured")),
            "\n## Harmless\n\n| Field | Known to | Why it changes nothing |\n|---|---|---|",
            *(f"| `{field.name}` | {field.apis} | {field.says} |" for field in _of("harmless")),
            "\n## Refused\n\n| Field | Known to | Values without effect | Why it is refused |\n|---|---|---|---|",
            *(f"| `{field.name}` | {field.apis} | {_neutral(field)} | {field.says} |" for field in _of("refused")),
            "",
        ]
    )


def _of(standing: str) -> list[Field]:
    return [field for field in FIELDS.values() if field.standing == standing]


def _neutral(field: Field) -> str:
    rule = RULES.get(field.name)
    return rule.text if rule else " or ".join(f"`{json.dumps(value)}`" for value in field.neutral)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
