"""Real models, tokenizers and texts that lie beside a developer's checkout. They are no part of the project."""

from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2] / "shared"


def shared(*parts: str) -> Path:
    """Path of a file in the data folder beside the checkout; skips the calling test where it is absent."""
    path = _ROOT.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {path}: real models and texts, which are no part of the project")
    return path
