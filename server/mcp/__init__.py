"""MCP servers, whose tools the chat page lets models call: a process for each is their client."""
