"""/stats: the model, its cache and the current requests, for people."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from polarlm.engine import Engine
from polarlm.engine.outputs import Reread, Status
from polarlm.engine.state.cache_types import describe_types, type_pair
from polarlm.server.reading.values import BadRequest
from polarlm.server.running.counters import Totals

_STATUS_FIELDS = ("blocks", "blocks_used", "blocks_kept", "blocks_free", "running", "waiting")
_MOST_REREADS = 3  # that are shown


def requested_tokens(query: Mapping[str, str]) -> int | None:
    """`tokens` of a query: the length of a sequence whose memory to report; None if absent. Raises BadRequest."""
    text = query.get("tokens")
    if text is None:
        return None
    if re.fullmatch("[0-9]{1,12}", text) is None:
        raise BadRequest("tokens", "tokens must be a whole number of tokens, as in /stats?tokens=500")
    return int(text)


def stats(
    engine: Engine, totals: Totals, status: Status, tokens: int | None, rereads: Sequence[Reread] = ()
) -> dict[str, Any]:
    """A JSON object; with `tokens`, it has the memory of such a sequence, as stored and if all were half precision.
    rereads: of the last hour, the dearest first."""
    cache = engine.cache_shape
    type_k, type_v = type_pair(engine.config)
    windows = [layer.window for layer in cache.layers if layer.window is not None]
    numbers: dict[str, Any] = {
        "model": engine.model.name,
        "context": engine.context,
        "cache_types": describe_types(engine.config, cache),
        "cache_type_k": type_k,
        "cache_type_v": type_v,
        "block_size": cache.block_size,
        "window": max(windows, default=None) if len(windows) == len(cache.layers) else None,  # None: all tokens
        "recent_blocks": cache.recent_blocks,  # of a sequence, which are in full precision
        "bits_per_value": cache.bits_per_value,  # of the others
        "bytes_per_token": cache.bytes_per_token,
        "f16_bytes_per_token": cache.f16_bytes_per_token,
        **{name: getattr(status, name) for name in _STATUS_FIELDS},
        "drafted_tokens": totals.drafted_tokens,
        "accepted_tokens": totals.accepted_tokens,
        "reread_tokens": sum(one.tokens for one in rereads),  # in the last hour
        "rereads": [str(one) for one in rereads[:_MOST_REREADS]],
    }
    for name in ("snapshots", "experts", "threads"):
        part = getattr(status, name)
        numbers[name] = None if part is None else asdict(part)
    for name, length in {"whole_context": engine.context, "sequence": tokens}.items():
        if length is not None:
            sizes = {"bytes": cache.sequence_bytes(length), "f16_bytes": cache.f16_bytes(length)}
            numbers[name] = {"tokens": length, **sizes}
    numbers["whole_context"]["bits_per_value"] = cache.bits_of_text(engine.context)
    return numbers
