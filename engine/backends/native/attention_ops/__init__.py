"""The attention op with compiled kernels: of steps, of prompts, and the tables of spans that its kernels read."""
