"""OpenAI's endpoints for chats, raw prompts and embeddings, and its shapes of answers."""
