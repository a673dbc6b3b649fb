"""The block-allocated KV store: `blocks.py` and `tables.py` hold integers, `store.py` the arrays."""
