"""The HTTP API: OpenAI's endpoints, and plain ones for sessions, tokens and status."""
