"""Fixtures of the storage tests."""

from tests.support.faulty_proxy import faulty_proxy
from tests.support.s3_server import s3_location, s3_server
from tests.support.small_disk import small_disk

__all__ = ["faulty_proxy", "s3_location", "s3_server", "small_disk"]
