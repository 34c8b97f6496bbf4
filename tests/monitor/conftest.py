"""Fixtures of the monitor's tests."""

from tests.support.redis_server import own_redis_server, redis_client, redis_server, shared_redis_server

__all__ = ["own_redis_server", "redis_client", "redis_server", "shared_redis_server"]
