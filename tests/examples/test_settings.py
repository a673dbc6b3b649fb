"""Settings of replicas are flags of the server."""

from __future__ import annotations

from typing import Any

import pytest

from examples.ray_serve.settings import read
from polarlm.engine.cli.flags import FlagError


def test_settings_are_flags_without_dashes() -> None:
    model, config = read({"ctx-size": 512, "no-calibration": True, "log-prompts": False, "allowed-host": ["a", "b"]})
    assert (model.ctx_size, model.calibration) == (512, False)
    assert (config.log_prompts, config.allowed_host) == (False, ("a", "b"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ctx-size": "many"}, "--ctx-size"),
        ({"weight": "x", "contxt": 1}, "--contxt"),
        ({"port": 9000}, "--port cannot be set here: Ray listens"),
        ({"sessions": "folder"}, "--sessions cannot be set here: only the replica that loads a session has it"),
    ],
)
def test_a_wrong_one_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FlagError, match=words):
        read(settings)
