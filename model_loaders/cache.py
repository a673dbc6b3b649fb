"""Where things that were made or fetched once are kept for the next time."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

CACHE_VARIABLE = "POLARLM_CACHE"


def cache_folder() -> Path:
    """The user's cache folder for this program, or the one that POLARLM_CACHE names; it need not exist yet."""
    return Path(os.environ.get(CACHE_VARIABLE) or user_cache_path("polarlm")).expanduser()
