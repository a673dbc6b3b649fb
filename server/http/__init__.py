"""The HTTP API: OpenAI's shapes for answers, and plain ones for what OpenAI has none for."""
