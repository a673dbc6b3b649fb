"""JSON lines over a socket, as docs/socket-protocol.md describes them."""
