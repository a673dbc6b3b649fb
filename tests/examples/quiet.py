"""How Ray runs in tests: it asks nobody, needs no token, and says little."""

QUIET = {
    "RAY_ADDRESS": "local",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
