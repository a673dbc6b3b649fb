"""Programs that use PolarLM together with other software; nothing imports them."""
