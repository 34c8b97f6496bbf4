"""The table at the end of a run."""

from __future__ import annotations

import pytest
import redis

from hiddenq.contracts.manifest import Manifest
from hiddenq.monitor.model import Totals
from hiddenq.progress import print_summary
from tests.monitor.made_fleet import made_record


def test_a_location_with_brackets_in_its_name_is_shown_as_it_is(
    redis_client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    record = made_record().model_copy(update={"location": "/data/[bold] [/x]"})
    config = record.config
    manifest = Manifest(
        run=config.run, complete=True, created_at="", num_rows=24, num_rejected=0, num_samples=24,
        num_samples_committed=24, num_tokens=600, num_tokens_committed=600, num_batches=6, num_batches_committed=6,
        num_bytes=1, index_checksum="", plan_digest="", dead_letters=(), self_checks=(),
    )  # fmt: skip
    nothing = Totals(num_batches=0, num_samples=0, num_tokens=0)
    print_summary(redis_client, record, manifest, {"extract and upload": 1.0}, nothing)
    assert "/data/[bold] [/x]" in capsys.readouterr().out
