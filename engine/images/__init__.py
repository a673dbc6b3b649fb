"""Images in messages: decoded by a process with limits, scaled, and named by ids."""
