"""The trainers' own packages, in a folder of their own.

Invariant: they are never installed into the environment under test, since they pin other versions of what it holds;
they are put into `build/trainers` without dependencies and used from there by separate processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "build" / "trainers"
PACKAGES = ["speculators==0.9.0", "hs-connectors==0.9.0", "nvidia-modelopt==0.47.0", "specforge==0.2.0"]
PACKAGES += ["nemo-automodel==0.7.0", "eagle-llm==1.2.1"]
NEEDED = ["distro==1.9.0", "jiter==0.19.0", "loguru==0.7.3", "omegaconf==2.4.0", "openai==3.57.0", "pulp==3.3.2"]
NEEDED += ["pillow==13.0.0", "pydantic-settings==2.16.3", "scipy==1.17.1", "sniffio==1.3.1"]
"""What importing their loaders needs beyond this environment."""
WANTED = " ".join(PACKAGES + NEEDED)


@pytest.fixture(scope="session")
def trainers() -> Path:
    """A folder to put on PYTHONPATH; filled on first use (some seconds). Without an index: skipped, but not in CI."""
    stamp = FOLDER / "complete"
    if not stamp.exists() or stamp.read_text() != WANTED:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(FOLDER)]
        done = subprocess.run([*command, *PACKAGES, *NEEDED], capture_output=True, text=True, check=False)
        if done.returncode:
            if os.environ.get("CI"):
                pytest.fail(f"the trainers can't be installed: {done.stderr[-500:]}")
            pytest.skip("the trainers can't be installed here")
        stamp.write_text(WANTED)
    return FOLDER
