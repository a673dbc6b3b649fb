"""Weights from files: safetensors and GGUF, their tensors, and the slots of a layer that these fill."""
