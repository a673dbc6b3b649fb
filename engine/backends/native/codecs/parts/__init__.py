"""Parts that the tiles of several codecs share: sections, packing, decoding, norms, products of bytes, tables."""
