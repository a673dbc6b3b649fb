"""The op set (`ops.py`) and its implementations, one file per backend."""
