"""The server: a socket that speaks JSON lines and an HTTP API in OpenAI's shapes, over one engine."""

import polarlm  # noqa: F401 - `server` alone is an alias
