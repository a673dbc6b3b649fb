"""The KV cache of layers with compiled kernels: quantized blocks in tiles, and their encoding."""
