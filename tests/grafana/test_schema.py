"""The committed dashboards against Grafana's own types (`@grafana/schema`), as the TypeScript compiler sees them.

The types are npm's, so this needs npm and its registry; without npm it is skipped, and nothing else depends on it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.grafana.queries import dashboards

pytestmark = pytest.mark.slow
SCHEMA = Path(__file__).parent / "schema"


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the types and the compiler."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("schema")
    for name in ("package.json", "package-lock.json", "dashboard.ts"):
        shutil.copy(SCHEMA / name, folder / name)
    subprocess.run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder, check=True, timeout=120)
    return folder


def errors(compiler: Path, values: list[object]) -> list[str]:
    """What the compiler says of these values as dashboards."""
    lines = ['import type { DashboardJson } from "./dashboard";']
    lines += [f"export const d{index}: DashboardJson = {json.dumps(value)};" for index, value in enumerate(values)]
    (compiler / "check.ts").write_text("\n".join(lines))
    options = [
        "--noEmit",
        "--strict",
        "--skipLibCheck",
        "--moduleResolution",
        "bundler",
        "--module",
        "esnext",
        "--target",
        "es2022",
    ]
    command = [str(compiler / "node_modules" / ".bin" / "tsc"), *options, "check.ts"]
    done = subprocess.run(command, cwd=compiler, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def test_every_dashboard_is_one_by_grafanas_own_types(compiler: Path) -> None:
    assert errors(compiler, list(dashboards())) == []


def test_the_check_refuses_what_grafana_would_not_know(compiler: Path) -> None:
    dashboard = dashboards()[0]
    panel = dashboard["panels"][1]
    panel["fieldConfig"]["defaults"]["unitt"] = "s"
    assert any("unitt" in line for line in errors(compiler, [dashboard]))
