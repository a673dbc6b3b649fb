"""What llama-server's documentation promises, and how this server keeps it."""
