"""The error of this package: a sentence for the user."""


class LoadError(ValueError):
    """A model cannot be loaded. The message names the file, what is wrong with it, and what to do."""
