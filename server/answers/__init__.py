"""Splits what the engine generates into pieces of text, reasoning and tool calls."""
