"""The text of an answer becomes pieces: text, reasoning, and calls of tools."""
