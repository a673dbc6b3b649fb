"""The op set in NumPy: the definition of correct, and the fallback without a GPU."""
