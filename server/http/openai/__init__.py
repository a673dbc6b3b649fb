"""OpenAI's endpoints for chats, plain prompts and embeddings, and its shapes of answers."""
