"""Every option of every `hiddenq` command, as Typer sees it, hidden commands included."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import typer

from tests.support.command import app

NOT_SETTINGS = ("--version", "--help")


class Option(NamedTuple):
    """One option of one command."""

    command: str
    name: str
    """Such as `--target-layers`."""
    variable: str | None
    """The environment variable that sets it, too."""
    kind: str
    """What its value is."""
    is_shown: bool
    """Whether the command's help names the variable."""


@functools.cache
def options() -> tuple[Option, ...]:
    """All of them."""
    return tuple(_of(typer.main.get_command(app), ()))


def _of(command: Any, path: tuple[str, ...]) -> Iterator[Option]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from _of(inner, (*path, name))
    for option in command.params:
        if option.param_type_name == "option" and option.opts[0] not in NOT_SETTINGS:
            declared = inspect.signature(command.callback).parameters[option.name].annotation
            is_shown = option.show_envvar and not command.hidden
            yield Option(" ".join(path), option.opts[0], option.envvar, str(declared.__origin__), is_shown)
