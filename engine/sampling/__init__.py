"""From logits to text: samplers, penalties, stop conditions and the detokenizer."""
