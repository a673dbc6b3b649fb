"""Reads weights from safetensors and GGUF files: their tensors, and the slots of a layer that the tensors fill."""
