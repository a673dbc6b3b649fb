"""What the engine generates becomes pieces of text, of reasoning and of calls of tools."""
