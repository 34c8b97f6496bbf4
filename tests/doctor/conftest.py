"""Real servers for the doctor's tests."""

from tests.support.redis_server import redis_server, shared_redis_server
from tests.support.s3_server import s3_server

__all__ = ["redis_server", "s3_server", "shared_redis_server"]
