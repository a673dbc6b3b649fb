"""The chat in a terminal: `python -m polarlm.engine.chat`."""
