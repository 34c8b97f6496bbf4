"""docs/trainers.md taken apart: its commands and its code, over a run that is there."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiddenq.reader import ExportSettings, export

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


def export_as_typed(command: str, folder: Path) -> None:
    """`hiddenq export …`, by its options, into a folder."""
    program, verb, *words = shlex.split(command)
    assert (program, verb) == ("hiddenq", "export")
    options: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            options[name] = True
        else:
            options[name] = word
    out, dest, to = options.pop("out"), options.pop("dest"), options.pop("to")
    export(out, ExportSettings(format=to, **options), folder / dest)
