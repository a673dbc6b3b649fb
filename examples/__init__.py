"""Programs that use PolarLM beside other software; nothing imports them."""
