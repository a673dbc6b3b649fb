"""Several models by name: each in a process of its own, which this server starts, asks and ends."""
