"""The block-allocated KV store: `blocks.py` counts, `store.py` holds the arrays."""
