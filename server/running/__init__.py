"""What runs from start to end: listening sockets, the driver, its threads, the log and the counters."""
