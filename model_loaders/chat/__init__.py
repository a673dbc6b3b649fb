"""How a model's chat template writes messages: templates in a sandboxed process, tool calls, reasoning."""
