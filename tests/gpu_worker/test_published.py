"""What a worker publishes is whole and true: every batch once, each state the model's own, each record right."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from hiddenq.contracts import checksum, names
from hiddenq.contracts.errors import LeaseLost
from hiddenq.contracts.shard import header_num_bytes, parse_header
from hiddenq.delivery import (
    Consumer,
    self_checks,
)
from hiddenq.storage.runfiles import load_batches, read_token_rows
from tests.gpu_worker.served import (
    FAST,
    Served,
    assert_nothing_is_held,
    make_run,
    published,
    serve_until,
)
from tests.support.models import save_fp8_model
from tests.support.redis_server import RedisServer


def test_every_batch_becomes_one_whole_shard(run: Served, model: Path) -> None:
    assert serve_until(run, lambda: len(run.spool.files()) == run.num_batches) == 0
    assert_nothing_is_held(run)
    shards = published(run)
    network = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    for batch in load_batches(run.store):
        rows = read_token_rows(run.store, batch.token_part, batch.first_row, batch.num_samples)
        path = shards[batch.batch_id]
        data = path.read_bytes()
        specs, metadata = parse_header(data[: header_num_bytes(data[:8], name="")], name="", num_bytes=len(data))
        assert len(specs) == 4 * len(rows)
        assert metadata["batch_id"] == batch.batch_id
        assert metadata["attention"] == "sdpa"
        assert metadata["target_layer_ids"] == [0, 2]
        tensors = load_file(path)
        for row in rows:
            ids = torch.from_numpy(row.input_ids).long()
            assert torch.equal(tensors[f"{row.sample_id}.input_ids"], ids)
            assert tensors[f"{row.sample_id}.loss_mask"].tolist() == row.loss_mask.tolist()
            with torch.inference_mode():
                plain = network(input_ids=ids[None], output_hidden_states=True).hidden_states
            stored = tensors[f"{row.sample_id}.hidden_states"]
            assert stored.shape == (len(ids), 2, 64)
            assert torch.allclose(stored[:, 0], plain[1][0], atol=1e-5)
            assert torch.allclose(stored[:, 1], plain[3][0], atol=1e-5)


def test_a_shard_can_be_read_by_another_user_of_the_group_and_its_message_is_true(run: Served) -> None:
    serve_until(run, lambda: len(run.spool.files()) == run.num_batches)
    jobs = run.client.lrange(f"rq:queue:{names.upload_queue(run.spool.spool_id)}", 0, -1)
    assert len(jobs) == run.num_batches
    for path in published(run).values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    consumer_side = _shards_ready(run)
    for shard in consumer_side:
        path = run.spool.path(shard.file_name)
        assert (shard.num_bytes, shard.checksum) == (path.stat().st_size, checksum.of_file(path))
        assert shard.data_offset == header_num_bytes(path.read_bytes()[:8], name="")


def _shards_ready(run: Served) -> list[Any]:
    """Claim all upload jobs, as an uploader would."""
    from hiddenq.contracts.messages import ShardReady
    from hiddenq.contracts.reports import WorkerReport

    report = WorkerReport(role="uploader", name="u", target="u", host="h", pid=1, spool_id=run.spool.spool_id)
    queue = names.upload_queue(run.spool.spool_id)
    with Consumer(run.client, queue, ShardReady, name="u", settings=FAST, report=lambda: report) as consumer:
        return [claim.message for claim in consumer.claim(100)]


def test_one_sample_of_each_length_band_is_checked_alone(run: Served) -> None:
    serve_until(run, lambda: len(run.spool.files()) == run.num_batches)
    checks = self_checks(run.client, run.config.run)
    bands = {(check.padded_length - 1).bit_length() for check in checks}
    assert bands == {(batch.padded_length - 1).bit_length() for batch in load_batches(run.store)}
    assert len(checks) == len(bands)
    assert all(check.max_relative_difference < 1e-5 for check in checks)


def test_a_run_decides_whether_a_quantised_model_is_dequantised_and_its_shards_say_so(
    tmp_path: Path, redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    model = save_fp8_model(tmp_path / "fp8")
    run = make_run(tmp_path, model, redis_server.url, redis_client, (30, 9), dequantize=True, dtype="float32")
    assert serve_until(run, lambda: len(run.spool.files()) == run.num_batches) == 0
    data = next(iter(published(run).values())).read_bytes()
    _, metadata = parse_header(data[: header_num_bytes(data[:8], name="")], name="", num_bytes=len(data))
    assert metadata["quantization"] == "fp8 (dequantized)"


def test_a_worker_whose_lease_is_lost_deletes_its_own_file(run: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Consumer.publish
    lost: list[Any] = []

    def lose_one(self: Any, claim: Any, shard: Any) -> None:
        if not lost:
            lost.append(shard.file_name)
            self.hand_back(claim)
            raise LeaseLost("another execution has it")
        publish(self, claim, shard)

    monkeypatch.setattr(Consumer, "publish", lose_one)
    assert serve_until(run, lambda: len(run.spool.files()) == run.num_batches) == 0
    assert not run.spool.path(lost[0]).exists()
    assert_nothing_is_held(run)
