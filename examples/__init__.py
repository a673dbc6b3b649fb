"""Programs around the engine that are not part of the package."""
