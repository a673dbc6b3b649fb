"""The HTTP API: OpenAI's endpoints, endpoints of other APIs, and plain ones for sessions, tokens and status."""
