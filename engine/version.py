"""The version of this program."""

from __future__ import annotations

import importlib.metadata


def release() -> str:
    """The version that is installed; empty for a checkout that is not."""
    try:
        return importlib.metadata.version("polarlm")
    except importlib.metadata.PackageNotFoundError:
        return ""
