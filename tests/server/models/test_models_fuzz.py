"""Whatever a request to a server of several models holds, it is answered or refused in the shape of its API."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.server.models.running import front, two_models
from tests.server.reading.test_http_fuzz import JUNK, status_of

MESSAGES = 400
ASKS = {"messages": [{"role": "user", "content": "on"}], "options": {"num_predict": 1}, "stream": False}
VALID: dict[str, dict[str, Any]] = {
    "/models/load": {"model": "big"},
    "/models/unload": {"model": "big"},
    "/api/show": {"model": "small:latest", "verbose": True},
    "/api/pull": {"model": "small", "stream": False, "insecure": True},
    "/api/chat": {"model": "small", "keep_alive": "5m", **ASKS},
    "/v1/embeddings": {"model": "small", "input": "on"},
    "/tokenize": {"model": "small", "content": "on"},
}
NAMES = ["..", "../small", "big/../small", "big\0", "small:latest:latest", "hf:a/b", "a" * 5000, "\x1b[31m"]
DURATIONS = ["1h30m", "9" * 90, "-1", "1e9", "٣m", ".", "h", 1e300, -(10**400)]


@pytest.mark.slow
def test_no_body_breaks_the_server_of_several_models(tmp_path: Path) -> None:
    rng, seen = random.Random(0), Counter[int]()
    with front(two_models(tmp_path)) as server:
        for number in range(MESSAGES):
            path = rng.choice(list(VALID))
            body = dict(VALID[path])
            for name in rng.sample([*body, "name"], rng.choice((0, 1, 2))):
                odd = {"model": NAMES, "name": NAMES, "keep_alive": DURATIONS}.get(name, [])
                body[name] = rng.choice([*JUNK, *odd])
            seen[status_of(server.http, path, json.dumps(body).encode(), {200, 400, 404, 501})] += 1
            if number % 20 == 0:  # what a body has left behind breaks no list
                for listed in ("/models", "/v1/models", "/api/tags", "/api/ps", "/metrics", "/health"):
                    assert server.http.get(listed).status_code == 200, f"{path}: {body}"
        assert min(seen[200], seen[400], seen[404]) > 20, seen
        assert server.slot("big").active == server.slot("small").active == 0
