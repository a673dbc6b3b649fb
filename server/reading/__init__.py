"""A request's JSON becomes an engine's prompt, options and sampling parameters."""
