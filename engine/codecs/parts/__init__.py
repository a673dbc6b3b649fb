"""Parts that several codecs share: norms, rotations, nearest points, trellises, checks of options."""
