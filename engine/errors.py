"""The errors of the engine: sentences for the user, with a code that programs can read."""


class EngineError(Exception):
    """Something the user asked for cannot be done. The message says what, where, and what to do.

    `code` is stable: "context_length_exceeded", "invalid_request", "device_unavailable", "out_of_memory", "closed",
    "model_unavailable" (its files are missing or cannot be used), "model_damaged", "session" (of a session file),
    "storage" (of the place for one).
    """

    def __init__(self, message: str, code: str = "invalid_request", settings: tuple[str, ...] = ()) -> None:
        """`settings`: the fields of EngineConfig that the message names, for which a command line has flags."""
        super().__init__(message)
        self.code = code
        self.settings = settings
