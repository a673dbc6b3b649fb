"""How Ray runs in tests: it asks nobody, needs no token, says little, and waits for what a busy machine starts late."""

QUIET = {
    "RAY_ADDRESS": "local",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # seconds, 5 otherwise; Ray then kills the proxy
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
