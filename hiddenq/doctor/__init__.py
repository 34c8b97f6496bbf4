"""What is wrong with this machine, before a run finds out: driver, GPUs, disks, clocks, Redis, store, model.

Consumes a machine and the settings it is about to use; produces findings, each with what was found, why it matters and
the command that mends it. Looks and never changes anything, but for one small probe object in the store. Imports
`hiddenq.contracts`, `.storage`, `.delivery`, `.telemetry`, `.model_files` and `.model_identity`; no torch.

    findings.py   a finding, and how it is shown     diagnose.py   which checks a role needs
    driver.py     driver, toolkit, torch's build     gpu.py        each GPU
    host.py       spool, disks, shared memory, caches
    queue.py      Redis                              location.py   the store
    model.py      the model: there, whole; kernels, memory
"""

from hiddenq.doctor.diagnose import DoctorSettings, Role, diagnose
from hiddenq.doctor.findings import Finding, exit_status, render

__all__ = ["DoctorSettings", "Finding", "Role", "diagnose", "exit_status", "render"]
