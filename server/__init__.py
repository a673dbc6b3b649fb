"""The server: HTTP APIs, a chat page, and JSON lines over a socket, for one engine."""

import polarlm  # noqa: F401 - `server` alone is an alias
