"""From files and settings to an engine: how large its parts get, how they are put together, how K/V are encoded."""
