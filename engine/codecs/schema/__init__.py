"""A codec's streams of codes: their names and bits, how they share bytes, and their order in the memory of a device."""
