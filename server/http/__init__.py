"""The HTTP API: OpenAI's endpoints, those of other APIs, and plain ones for sessions, tokens and status."""
