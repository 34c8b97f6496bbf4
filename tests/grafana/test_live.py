"""The shipped dashboards, rules and configuration against a real pipeline under real Prometheus and Alertmanager.

Proves: a machine that joins is scraped within 30 s with no file edited; every panel's, variable's and annotation's
query answers with series that carry the labels its legend names, and so does each selector alone; panels show what
ledger and store hold; and a worker that is stopped, one that is killed for good and a store that is gone reach
Alertmanager in time.

The tests share one stack and go on from one another's state, in the order written here.
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType

import pytest
from prometheus_client import CollectorRegistry

from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.delivery import Ledger, forget, load_run
from tests.grafana.queries import (
    alert_queries,
    annotation_queries,
    dashboards,
    filled,
    panel_queries,
    selectors,
)
from tests.grafana.stack import DELIVERY, TIMING, Stack, eventually, logs_of, running_stack, signal_process
from tests.monitor.made_fleet import MadeWorker
from tests.support.ports import free_port
from tests.support.s3_server import BUCKET

pytestmark = pytest.mark.slow

LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")
LOOK_SECONDS = 1
"""Between two looks of the monitor, two scrapes and two evaluations, in this stack."""
SLACK_SECONDS = 20
"""For a machine with two cores on which other tests run, too."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


def panel(
    stack: Stack, dashboard: str, title: str, variables: Mapping[str, str] = MappingProxyType({}), *, index: int = 0
) -> float:
    """The sum of what a panel's query shows now."""
    for one in dashboards():
        if one["uid"] == f"hiddenq-{dashboard}":
            for shown in one["panels"]:
                if shown.get("title") == title and shown["type"] != "row":
                    expr = filled(shown["targets"][index]["expr"], **variables)
                    return sum(float(series["value"][1]) for series in stack.query(expr))
    raise AssertionError(f"no panel {title} in {dashboard}")


def test_a_machine_that_joins_is_scraped_within_30_seconds_and_no_file_is_edited(stack: Stack) -> None:
    eventually(stack, lambda: stack.value('sum(up{job="hiddenq"})') == 6, seconds=120, what="six targets that answer")
    labels = {(one["metric"]["host"], one["metric"]["role"]) for one in stack.query('up{job="hiddenq"}')}
    assert labels == {(host, role) for host in ("node1", "node2", "node3") for role in ("gpu_worker", "uploader")}
    port = telemetry.serve_metrics(CollectorRegistry(), port=free_port())
    joined = time.time()
    MadeWorker(
        stack.client, load_run(stack.client, "made"), "cuda:9", host="node4", metrics_address=f"127.0.0.1:{port}"
    ).beat()
    eventually(stack, lambda: stack.value('up{host="node4"}') == 1, seconds=60, what="a target for node4")
    took = time.time() - joined
    print(f"scraped {took:.1f} s after it joined")
    assert took < 30, logs_of(stack)
    assert forget(stack.client, "node4") == 1
    eventually(stack, lambda: not stack.query('up{host="node4"}'), seconds=60, what="node4 forgotten")


def test_every_query_of_every_panel_answers_with_the_labels_that_its_legend_names(stack: Stack) -> None:
    def going() -> bool:
        rate = stack.value('sum(rate(hiddenq_uploader_uploaded_bytes_total{host=~"node[12]"}[10s]))')
        return bool(rate) and bool(stack.query("hiddenq_monitor_run_eta_seconds"))

    eventually(stack, going, seconds=60, what="shards that reach the store")
    eventually(stack, lambda: stack.query('ALERTS{alertstate="firing"}'), seconds=30, what="an alert")
    missing = []
    for query in panel_queries():
        result = stack.query(filled(query.expr, __rate_interval="10s"))
        if not result:
            missing.append(f"{query.where}: {query.expr}")
    assert missing == []
    for one in dashboards():
        for shown in one["panels"]:
            for target in shown.get("targets", []):
                wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                found = stack.query(filled(target["expr"], __rate_interval="10s"))
                # An uploader has no device and an extract queue no host: one series that has all is enough.
                full = wanted - {"device"} if "up{" in target["expr"] else wanted
                assert full <= set().union(*(series["metric"] for series in found)), (
                    f"{shown['title']}: {target['expr']}"
                )


def test_every_selector_alone_answers(stack: Stack) -> None:
    queries = [*panel_queries(), *alert_queries(), *annotation_queries()]
    every = sorted({selector for query in queries for selector in selectors(query.expr)})
    assert len(every) > 60
    assert [one for one in every if not stack.query(filled(one))] == []


def test_every_query_of_every_annotation_answers(stack: Stack) -> None:
    assert [query.where for query in annotation_queries() if not stack.query(query.expr)] == []


def test_every_variable_has_the_values_of_this_fleet(stack: Stack) -> None:
    expected = {"run": {"made", stack.run}, "host": {"node1", "node2", "node3"}, "gpu": {"cpu", "cuda:0"}}
    for dashboard in dashboards():
        for variable in dashboard["templating"]["list"]:
            match = LABEL_VALUES.fullmatch(variable["query"])
            assert match, variable["query"]
            answer = stack.get(f"label/{match['label']}/values", **{"match[]": filled(match["selector"])})
            assert expected[variable["name"]] <= set(answer["data"]), variable["name"]


def test_every_rule_is_evaluated_without_an_error(stack: Stack) -> None:
    (group,) = stack.get("rules")["data"]["groups"]
    assert {rule["name"] for rule in group["rules"]} == {query.where for query in alert_queries()}
    assert [rule["name"] for rule in group["rules"] if rule["health"] != "ok" or rule.get("lastError")] == []


def test_nothing_but_what_is_so_fires_while_all_goes_well(stack: Stack) -> None:
    """The made run has a dead letter and its worker met an XID; nobody says a word of the real one."""
    firing = {
        one["metric"]["alertname"] for one in stack.query('ALERTS{alertstate="firing", run!="made", host!="node3"}')
    }
    assert firing == set()
    assert stack.first_told("HiddenqDeadLetters", run="made")


def test_panels_show_what_ledger_and_store_hold(stack: Stack) -> None:
    """The queue is set aside until all that was in hand is committed: a moment in which every number is exact."""
    queue = f"rq:queue:{names.extract_queue(stack.run)}"
    stack.client.rename(queue, "test:parked")
    ledger = Ledger(stack.client, stack.run)
    of_run = f'{{run="{stack.run}"}}'

    def still() -> bool:
        return (
            stack.value(f'sum(rate(hiddenq_gpu_worker_batches_total{{run="{stack.run}"}}[5s]))') == 0
            and stack.value(f'sum(hiddenq_monitor_queue_depth{{run=~"{stack.run}|", host!="node3"}})') == 0
            and stack.value('sum(hiddenq_monitor_queue_started{host!="node3"})') == 0
            and stack.value(f'hiddenq_monitor_run_batches_committed{{run="{stack.run}"}}')
            == ledger.totals().num_batches
            and stack.value("sum(hiddenq_uploader_spool_files)") == 1  # the made uploader's
        )

    eventually(stack, still, seconds=60, what="a moment in which nothing moves")
    totals, config = ledger.totals(), stack.record.config
    objects = [
        found
        for page in stack.s3.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="watched/states/")
        for found in page.get("Contents", [])
    ]
    stored = sum(found["Size"] for found in objects)
    assert totals.num_batches > 20
    assert len(objects) == totals.num_batches
    run = {"run": stack.run, "host": "node[12]"}

    def wrong() -> dict[str, tuple[float | None, float]]:
        shown_and_true = {
            "Done": (panel(stack, "run", "Done", run), totals.num_tokens / config.num_tokens),
            "Samples": (panel(stack, "run", "Samples", run), totals.num_samples),
            "Samples in all": (panel(stack, "run", "Samples", run), totals.num_samples),
            "Batches": (panel(stack, "run", "Batches", run), len(objects)),
            "In the store": (panel(stack, "run", "In the store", run), stored),
            "Complete": (panel(stack, "run", "Complete", run), 0),
            "Tokens": (panel(stack, "run", "Tokens", run), totals.num_tokens),
            "Tokens in all": (panel(stack, "run", "Tokens", run, index=1), config.num_tokens),
            "Dead letters": (panel(stack, "fleet", "Dead letters", {"run": "made"}), 1),
            "Batches that wait": (panel(stack, "fleet", "Batches that wait", run), 0),
            "Shards that wait": (panel(stack, "uploads", "Shards that wait", run), 0),
            "GPU workers alive": (panel(stack, "fleet", "GPU workers alive"), 1),
            "Redis answers": (panel(stack, "fleet", "Redis answers"), 1),
            "Files in the spool": (panel(stack, "uploads", "Files in the spool", run, index=1), 0),
            "Scraped targets": (panel(stack, "fleet", "Scraped targets"), 6),
            "executed batches": (stack.value(f"sum(hiddenq_gpu_worker_batches_total{of_run})"), len(objects)),
            "executed tokens": (
                stack.value(f"sum(hiddenq_gpu_worker_tokens_total{of_run})"),
                totals.num_tokens,
            ),
            "written bytes": (stack.value(f"sum(hiddenq_gpu_worker_written_bytes_total{of_run})"), stored),
            "uploaded bytes": (stack.value('sum(hiddenq_uploader_uploaded_bytes_total{host=~"node[12]"})'), stored),
            "committed files": (
                stack.value('sum(hiddenq_uploader_files_total{host=~"node[12]", result="committed"})'),
                len(objects),
            ),
        }
        return {
            name: both
            for name, both in shown_and_true.items()
            if not math.isclose(both[0] or 0.0, both[1], rel_tol=1e-9)
        }

    # The spool's figures come by way of heartbeats: one more of each may be on its way.
    eventually(stack, lambda: not wrong(), seconds=10, what=f"panels that show the truth: {wrong()}")
    stack.client.rename("test:parked", queue)


def test_a_stopped_worker_a_killed_one_and_a_store_that_is_gone_are_told_in_time(stack: Stack) -> None:
    """Four faults at once. Expected by: how long until the symptom is one, plus looks, scrapes and evaluations."""

    def both_extract() -> bool:
        moved = stack.query(f'rate(hiddenq_gpu_worker_batches_total{{run="{stack.run}"}}[5s]) > 0')
        return len(moved) == 2

    eventually(stack, both_extract, seconds=30, what="two workers that extract")
    store_gone = time.time()
    stack.s3.process.kill()
    stopped = signal_process(stack, "worker node1", signal.SIGSTOP)
    killed = signal_process(stack, "worker node2", signal.SIGKILL)
    # A forward pass that never returns: the heart beats, and no batch is finished.
    assert stack.made_worker is not None
    stack.made_worker.say(state="busy", batch_id="000000", utilization=1.0)
    hung = time.time()
    steps = 5 * LOOK_SECONDS + SLACK_SECONDS  # heartbeat, look, scrape, evaluation, Alertmanager's group_wait
    missing = DELIVERY.lease_seconds + TIMING.restart_seconds + steps
    expected = {
        "hung node3": ("HiddenqGpuStalled", {"host": "node3", "run": "made"}, hung, TIMING.floor_seconds + steps),
        "missing node1": ("HiddenqGpuWorkerMissing", {"host": "node1", "run": stack.run}, stopped, missing),
        "missing node2": ("HiddenqGpuWorkerMissing", {"host": "node2", "run": stack.run}, killed, missing),
    }
    late = {}
    for name, (alert, labels, since, limit) in expected.items():
        told = eventually(stack, partial(stack.first_told, alert, **labels), seconds=60, what=name)
        late[name] = told["came_at"] - since
        print(f"{name}: {alert} told after {late[name]:.1f} s (limit {limit:.1f} s)")
        assert late[name] < limit, late
    # That node1 is gone says that it stands still: the second is kept back.
    kept_back = partial(stack.kept_back, "HiddenqGpuStalled", host="node1")
    eventually(stack, kept_back, seconds=60, what="the stall of node1, kept back by its absence")
    told = eventually(
        stack, lambda: stack.first_told("HiddenqStoreErrors", host="node1"), seconds=60, what="the store's errors"
    )
    print(f"store gone: HiddenqStoreErrors told after {told['came_at'] - store_gone:.1f} s")
    assert told["labels"]["severity"] == "critical"


def test_a_worker_that_goes_on_ends_its_alert(stack: Stack) -> None:
    signal_process(stack, "worker node1", signal.SIGCONT)
    eventually(
        stack,
        lambda: stack.first_told("HiddenqGpuWorkerMissing", "resolved", host="node1"),
        seconds=60,
        what="the end of node1's alert",
    )
