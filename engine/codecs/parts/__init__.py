"""Parts that several codecs share: norms, rotations, nearest points, checks of options."""
