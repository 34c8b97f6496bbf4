"""docs/trainers.md taken apart: its commands and its code, over a run that is there."""

from __future__ import annotations

import contextlib
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.command import exit_status

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^    (?P<command>hiddenq [^\n]+)$|^```python(?: (?P<trainer>\w+))?\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass
class TrainersPage:
    """Commands in order, and code by trainer (`""`: needs none)."""

    commands: list[str] = field(default_factory=list)
    code: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, run: Path) -> TrainersPage:
        """The page, with a run in place of its example."""
        page = cls()
        text = (ROOT / "docs/trainers.md").read_text().replace("s3://bucket/run", str(run))
        for block in _BLOCK.finditer(text):
            if block["command"]:
                page.commands.append(block["command"])
            else:
                trainer = block["trainer"] or ""
                page.code[trainer] = page.code.get(trainer, "") + block["code"] + "\n"
        return page


def type_command(command: str, folder: Path) -> None:
    """Run a command of the page in a folder, as the command line does."""
    program, *arguments = shlex.split(command)
    assert program == "hiddenq"
    with contextlib.chdir(folder):
        assert exit_status(arguments) == 0, command
