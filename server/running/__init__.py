"""What runs as long as the server does: listening sockets, the driver, its threads, the log and the counters."""
