"""JSON schemas: one normal form of all that is written, and what grammars of answers and calls get of it."""
