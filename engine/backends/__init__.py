"""The op set (`ops.py`) and its implementations, one folder per backend."""
