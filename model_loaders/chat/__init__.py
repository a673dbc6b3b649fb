"""Messages as a model's chat template writes them: templates in a sandboxed process, calls of tools, reasoning."""
