"""Parts that several codecs share: norms, rotations, nearest points, an error for options."""
