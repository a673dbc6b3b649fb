"""Makes an engine from files and settings: the sizes of its parts, their assembly, and how K/V are encoded."""
