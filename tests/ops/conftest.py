"""The ops of a backend: see `tests.ops.backends.backends`."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def ops(request: pytest.FixtureRequest) -> Any:
    return request.param.open()
