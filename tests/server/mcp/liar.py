"""A program that speaks the protocol of 2025 by hand, and says what is not so: `python liar.py [pages|schema|abyss]`"""

from __future__ import annotations

import json
import sys
from typing import Any

OBJECT = {"type": "object"}


def deep(levels: int) -> dict[str, Any]:
    """A schema of so many objects inside each other."""
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return OBJECT | schema


TOOLS = [
    {"name": "good", "inputSchema": OBJECT},
    {"name": "a b", "inputSchema": OBJECT},
    {"name": "a_b", "inputSchema": OBJECT},
    {"name": "list", "inputSchema": OBJECT},
    {"name": "deep", "inputSchema": deep(70)},
    {"name": "structured", "inputSchema": OBJECT, "outputSchema": OBJECT | {"required": ["a"]}},
    {"name": "half a character", "inputSchema": OBJECT},
    {"name": "too deep", "inputSchema": OBJECT},
    {"name": "unreadable", "inputSchema": OBJECT, "outputSchema": OBJECT | {"properties": {"a": {"type": 5}}}},
]
RESULTS: dict[str, Any] = {
    "structured": {"content": [], "structuredContent": {}},
    "unreadable": {"content": [], "structuredContent": {"a": 1}},
    "a b": {"content": [{"type": "hologram"}]},
    "list": {"content": 5},
    "deep": {},
    "half a character": {"content": [{"type": "text", "text": "\ud800"}]},
    "too deep": {"content": [], "structuredContent": deep(200)},
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        about = {"serverInfo": {"name": "liar", "version": "1"}, "capabilities": {"tools": {}}}
        return {"result": about | {"protocolVersion": params["protocolVersion"]}}
    if method == "tools/list":
        wrong = [{"name": "wrong", "inputSchema": {"type": "array"}}] if "schema" in sys.argv else []
        wrong += [{"name": "wrong", "inputSchema": deep(400)}] if "abyss" in sys.argv else []
        return {"result": {"tools": [*TOOLS, *wrong], **({"nextCursor": "more"} if "pages" in sys.argv else {})}}
    if method == "tools/call":
        return {"result": RESULTS.get(params["name"], {"content": [{"type": "text", "text": "well"}]})}
    return {"error": {"code": -32601, "message": "no such method"}}


if __name__ == "__main__":
    for line in sys.stdin:
        said = json.loads(line)
        if "id" in said:
            answered = {"jsonrpc": "2.0", "id": said["id"], **answer(said["method"], said.get("params"))}
            print(json.dumps(answered), flush=True)
