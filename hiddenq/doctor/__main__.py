"""`python -m hiddenq.doctor ROLE`: the preflight of a container, from the environment alone.

Findings go to stderr; errors end it with exit status 2, so that the container does not start half able. One that starts
before its Redis is restarted until Redis is there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import cast, get_args

from pydantic import ValidationError

from hiddenq.contracts.errors import UserError
from hiddenq.doctor.diagnose import DoctorSettings, Role, diagnose
from hiddenq.doctor.findings import error, exit_status, render
from hiddenq.storage import StoreSettings
from hiddenq.telemetry import configure_logging

PREFIX = "HIDDENQ_"


def main() -> int:
    """Check this machine for a role."""
    role = cast(Role, sys.argv[1] if len(sys.argv) == 2 else "")
    if role not in get_args(Role):
        print(f"usage: python -m hiddenq.doctor {'|'.join(get_args(Role))}", file=sys.stderr)
        return 2
    configure_logging(stage="doctor")
    try:
        findings = diagnose(settings_of(role, os.environ))
    except UserError as refusal:
        findings = [error(str(refusal), "the service would end at once", "set it right in .env")]
    except ValidationError as refusal:
        first = refusal.errors()[0]
        name = PREFIX + str(first["loc"][-1]).upper()
        findings = [error(f"{name}: {first['msg']}", "the service would end at once", "set it right in .env")]
    if any(finding.level != "ok" for finding in findings):
        print(render(findings), file=sys.stderr)
    return exit_status(findings)


def settings_of(role: Role, variables: Mapping[str, str]) -> DoctorSettings:
    """What the role's command would take from the same variables.

    Raises:
        UserError, ValidationError: a variable that the command would refuse, too.
    """
    given = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in variables.items()
        if name.startswith(PREFIX) and value
    }
    return DoctorSettings.model_validate(
        {
            "role": role,
            "devices": given.get("devices", "auto"),
            "redis_url": given.get("redis_url"),
            "spool": given.get("spool") if role in ("worker", "upload") else None,
            "location": given.get("out") if role == "produce" else None,
            "store": {name: given[name] for name in StoreSettings.model_fields if name in given},
            "model": given.get("worker_model") if role == "worker" else None,
            "gpus_per_worker": given.get("gpus_per_worker", 1),
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
