"""Two kinds of blocks in one memory: where they lie, and when the old ones of a sequence are requantized."""
