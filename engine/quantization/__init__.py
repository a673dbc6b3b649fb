"""How K/V become codes well: conditioning, what errors cost, and choosing codes by it."""
