"""Encoding of blocks with error feedback: the arithmetic of `engine.quantization.encode`, one unit per block and KV
head.

A row is a channel, its lanes are tokens, 16 per vector. Vectors are rounded pair by pair, all tokens of the block at
once, with one norm after another.

Letters: N tokens in a block, D head dim, P pairs (or single values) of a vector.
"""
