"""`python -m hiddenq.doctor ROLE`: the preflight of a container, from the environment alone.

Findings go to stderr; errors end it with exit status 2, so that the container does not start half able. One that starts
before its Redis is restarted until Redis is there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import cast, get_args

from hiddenq.doctor.diagnose import DoctorSettings, Role, diagnose
from hiddenq.doctor.findings import exit_status, render
from hiddenq.storage import StoreSettings
from hiddenq.telemetry import configure_logging


def main() -> int:
    """Check this machine for a role."""
    role = cast(Role, sys.argv[1] if len(sys.argv) == 2 else "")
    if role not in get_args(Role):
        print(f"usage: python -m hiddenq.doctor {'|'.join(get_args(Role))}", file=sys.stderr)
        return 2
    configure_logging(stage="doctor")
    environment = {name.removeprefix("HIDDENQ_"): value for name, value in os.environ.items() if value}
    settings = DoctorSettings(
        role=role,
        devices=environment.get("DEVICES", "auto"),
        redis_url=environment.get("REDIS_URL"),
        spool=Path(environment["SPOOL"]) if role in ("worker", "upload") and "SPOOL" in environment else None,
        location=environment.get("OUT") if role == "produce" else None,
        store=StoreSettings(endpoint_url=environment.get("ENDPOINT_URL"), region=environment.get("REGION")),
    )
    findings = diagnose(settings)
    if any(finding.level != "ok" for finding in findings):
        print(render(findings), file=sys.stderr)
    return exit_status(findings)


if __name__ == "__main__":
    raise SystemExit(main())
