"""The reader, verify and exports over a real S3 server: by ranges, in parallel, without a local copy."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hiddenq.contracts.errors import DamagedShard, StoreAway, StoreRefused
from hiddenq.reader import ExportSettings, HiddenStatesDataset, HiddenStatesStream, collate, export, open_run, verify
from hiddenq.reader.exports import STATEMENT, ExportStatement
from hiddenq.storage import StoreSettings, open_store, s3_client
from tests.support.faulty_proxy import Answer, FaultyProxy, Request, Reset, faulty_proxy
from tests.support.made_run import MadeRun
from tests.support.s3_server import S3Location, S3Server, s3_location, s3_server
from tests.support.samples import both_states
from tests.support.waiting import wait_until

__all__ = ["faulty_proxy", "s3_location", "s3_server"]


def reads_shards(request: Request) -> bool:
    return request.method == "GET" and "/states/" in request.target


def upload(folder: Path, location: S3Location, server: S3Server) -> StoreSettings:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            key = f"{location.prefix}/{path.relative_to(folder).as_posix()}"
            server.client().put_object(Bucket=location.bucket, Key=key, Body=path.read_bytes())
    return StoreSettings(endpoint_url=server.endpoint_url, region="us-east-1")


@pytest.fixture
def through_proxy(
    model_run: MadeRun,
    s3_server: S3Server,
    s3_location: S3Location,
    faulty_proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> StoreSettings:
    """Settings that reach a run in a bucket through the proxy; requests are few and asked again at once."""
    monkeypatch.setattr(s3_client, "WAIT_SECONDS", 0.001)
    monkeypatch.setattr("hiddenq.reader.ahead.GROUP_BYTES", 0)
    settings = upload(model_run.folder, s3_location, s3_server)
    return settings.model_copy(update={"endpoint_url": faulty_proxy.endpoint_url})


def test_a_run_in_a_bucket_reads_streams_verifies_and_exports(
    model_run: MadeRun, s3_server: S3Server, s3_location: S3Location, tmp_path: Path
) -> None:
    settings = upload(model_run.folder, s3_location, s3_server)
    run, local = open_run(s3_location.uri, settings), open_run(model_run.folder)
    assert run.sample_ids.tolist() == local.sample_ids.tolist()
    for sample_id in local:
        for name in ("input_ids", "loss_mask", "hidden_states", "final_hidden_state"):
            assert torch.equal(getattr(run[sample_id], name), getattr(local[sample_id], name))
    logits, wanted = (each.target_head.logits(both_states(each[0])[1]) for each in (run, local))
    assert torch.equal(logits, wanted)
    assert sorted(sample.sample_id for sample in HiddenStatesStream(run)) == sorted(local)
    loader = DataLoader(HiddenStatesDataset(run), batch_size=4, collate_fn=collate, num_workers=1)
    assert [int(each) for batch in loader for each in batch["sample_ids"]] == list(local)

    report = verify(s3_location.uri, settings, deep=True)
    assert report.ok, report.lines()
    assert report.num_bytes == sum((model_run.folder / key).stat().st_size for key in model_run.shard_keys)

    dest = s3_location.uri + "-export"
    export(run, ExportSettings(format="specforge"), dest, dest_settings=settings)
    export(local, ExportSettings(format="specforge"), tmp_path)
    store = open_store(dest, settings)
    for path in tmp_path.rglob("*.ckpt"):
        assert store.get_bytes(path.relative_to(tmp_path).as_posix()) == path.read_bytes()
    again = export(run, ExportSettings(format="specforge"), dest, dest_settings=settings)
    assert again.num_written == 0


def test_faults_in_a_bucket_are_found(model_run: MadeRun, s3_server: S3Server, s3_location: S3Location) -> None:
    settings = upload(model_run.folder, s3_location, s3_server)
    bucket, client = s3_location.bucket, s3_server.client()
    first, second = (f"{s3_location.prefix}/{key}" for key in model_run.shard_keys[:2])
    damaged = bytearray((model_run.folder / model_run.shard_keys[0]).read_bytes())
    damaged[-100] ^= 1
    client.put_object(Bucket=bucket, Key=first, Body=bytes(damaged))
    client.delete_object(Bucket=bucket, Key=second)
    client.put_object(Bucket=bucket, Key=f"{s3_location.prefix}/states/stray", Body=b"x")
    client.put_object(Bucket=bucket, Key=f"{s3_location.prefix}/notes.txt", Body=b"x")
    report = verify(s3_location.uri, settings)
    assert set(report.num_findings) >= {"damaged_shard", "missing_shard", "stray_object"}
    assert report.foreign_objects == ("notes.txt",)


def test_a_damaged_shard_in_a_bucket_is_exported_to_nowhere(
    model_run: MadeRun, s3_server: S3Server, s3_location: S3Location, tmp_path: Path
) -> None:
    settings = upload(model_run.folder, s3_location, s3_server)
    key = model_run.shard_keys[0]
    damaged = bytearray((model_run.folder / key).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    s3_server.client().put_object(Bucket=s3_location.bucket, Key=f"{s3_location.prefix}/{key}", Body=bytes(damaged))
    with pytest.raises(DamagedShard, match=f"^{key}: damaged .*; delete the object and give the same `hiddenq run`"):
        export(s3_location.uri, ExportSettings(format="eagle"), tmp_path / "out", source_settings=settings)
    assert not ExportStatement.parse((tmp_path / "out" / STATEMENT).read_bytes()).complete
    run = open_run(s3_location.uri, settings)
    assert len(list(HiddenStatesStream(run))) == len(run), "a range alone can't be checked"
    got: list[int] = []
    with pytest.raises(DamagedShard, match=f"^{key}: damaged"):
        got.extend(sample.sample_id for sample in HiddenStatesStream(run.checked()))
    assert not set(got) & set(model_run.sample_ids[0])


def test_a_bucket_that_is_not_there_is_one_line(s3_server: S3Server) -> None:
    settings = StoreSettings(endpoint_url=s3_server.endpoint_url, region="us-east-1")
    with pytest.raises(StoreRefused):
        open_run("s3://no-such-bucket-here/run", settings)


def test_an_index_in_a_bucket_is_read_once_for_all_samples(
    model_run: MadeRun, s3_server: S3Server, s3_location: S3Location
) -> None:
    settings = upload(model_run.folder, s3_location, s3_server)
    run = open_run(s3_location.uri, settings)
    s3_server.client().delete_object(Bucket=s3_location.bucket, Key=f"{s3_location.prefix}/index.parquet")
    assert np.array_equal([len(run[sample_id]) for sample_id in run], run.lengths)


@pytest.mark.parametrize("fault", [Answer(503, "SlowDown"), Reset()], ids=str)
def test_an_outage_in_the_middle_of_a_stream_is_waited_for(
    s3_location: S3Location,
    faulty_proxy: FaultyProxy,
    through_proxy: StoreSettings,
    caplog: pytest.LogCaptureFixture,
    fault: Answer | Reset,
) -> None:
    run = open_run(s3_location.uri, through_proxy)
    stream = HiddenStatesStream(run, prefetch_bytes=0, threads=1)
    iterator = iter(stream)
    got = [next(iterator).sample_id]
    plan = faulty_proxy.plan(fault, times=s3_client.NUM_ATTEMPTS + 2, when=reads_shards)
    got += [sample.sample_id for sample in iterator]
    assert got == stream.order().tolist()
    assert plan.num_met == s3_client.NUM_ATTEMPTS + 2, "one read gave up on the store, and the reader did not"
    assert "waiting for the store" in caplog.text


def test_an_outage_that_lasts_ends_the_stream_which_can_go_on_later(
    s3_location: S3Location,
    faulty_proxy: FaultyProxy,
    through_proxy: StoreSettings,
) -> None:
    run = open_run(s3_location.uri, through_proxy, wait_seconds=0.1)
    stream = HiddenStatesStream(run, prefetch_bytes=0, threads=1)
    iterator = iter(stream)
    got = [next(iterator).sample_id for _ in range(3)]
    faulty_proxy.plan(Answer(503, "SlowDown"), when=reads_shards)
    with pytest.raises(StoreAway, match="SlowDown"):
        got.extend(sample.sample_id for sample in iterator)
    faulty_proxy.heal()
    again = HiddenStatesStream(run)
    again.load_state_dict(stream.state_dict())
    assert got + [sample.sample_id for sample in again] == stream.order().tolist()


def test_verify_and_an_export_wait_for_an_outage(
    model_run: MadeRun,
    s3_location: S3Location,
    faulty_proxy: FaultyProxy,
    through_proxy: StoreSettings,
) -> None:
    reads = faulty_proxy.plan(Answer(503, "SlowDown"), times=s3_client.NUM_ATTEMPTS + 2, when=reads_shards)
    report = verify(s3_location.uri, through_proxy, threads=1)
    assert report.ok, report.lines()
    assert reads.num_met == s3_client.NUM_ATTEMPTS + 2
    writes = faulty_proxy.plan(
        Answer(503, "SlowDown"),
        times=s3_client.NUM_ATTEMPTS + 2,
        when=lambda request: request.method == "PUT" and "data_0.ckpt" in request.target,
    )
    dest = s3_location.uri + "-export"
    done = export(model_run.folder, ExportSettings(format="eagle"), dest, dest_settings=through_proxy, threads=1)
    assert done.statement.complete
    assert writes.num_met == s3_client.NUM_ATTEMPTS + 2


def test_a_stream_through_an_outage_draws_nothing_from_the_generators_that_a_trainer_has_seeded(
    s3_location: S3Location,
    faulty_proxy: FaultyProxy,
    through_proxy: StoreSettings,
) -> None:
    reads = faulty_proxy.plan(Answer(503, "SlowDown"), times=s3_client.NUM_ATTEMPTS + 2, when=reads_shards)
    random.seed(3)
    torch.manual_seed(3)
    before = random.getstate(), torch.get_rng_state()
    num_samples = sum(1 for _ in HiddenStatesStream(open_run(s3_location.uri, through_proxy), threads=1))
    assert num_samples > 0
    assert reads.num_met == s3_client.NUM_ATTEMPTS + 2
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_stream_that_is_left_in_an_outage_does_not_wait_for_its_end(
    s3_location: S3Location,
    faulty_proxy: FaultyProxy,
    through_proxy: StoreSettings,
) -> None:
    run = open_run(s3_location.uri, through_proxy)
    seen = itertools.count()
    plan = faulty_proxy.plan(Answer(503, "SlowDown"), when=lambda each: reads_shards(each) and next(seen) > 0)
    iterator = iter(HiddenStatesStream(run, threads=1))
    next(iterator)
    wait_until(lambda: plan.num_met > s3_client.NUM_ATTEMPTS)
    started = time.monotonic()
    assert isinstance(iterator, Generator)
    iterator.close()
    assert time.monotonic() - started < 5
