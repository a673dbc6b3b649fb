"""Where a model goes: which layers and experts are on which device, and how large its KV store gets beside them."""
