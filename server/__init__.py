"""The server: a socket that speaks JSON lines and an HTTP API in OpenAI's shapes, over one engine."""
