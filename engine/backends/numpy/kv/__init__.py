"""The K/V of layers in NumPy: memory for quantized blocks, and their encoding."""
