"""The chat in a terminal: `python -m engine.chat`."""
