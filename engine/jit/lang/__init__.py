"""The language: values, and the operations on them."""
