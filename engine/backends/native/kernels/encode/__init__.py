"""Encoding of blocks in kernels, of which README.md has a picture.

Letters: N tokens in a block, D head dim, P pairs (or single values) of a vector.
"""
