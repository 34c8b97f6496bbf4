"""Groups of command-line options, each a dataclass that several commands share.

Invariant: an option is declared once. `grouped` shows Typer the fields of every dataclass parameter as options of
the command, and hands the command whole groups. Each option is also the environment variable `HIDDENQ_<OPTION>`; where
that name means something else for another command, the option has a name of its own, which its help shows.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

from typer.models import OptionInfo

ENVIRONMENT_PREFIX = "HIDDENQ_"


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Make a command whose dataclass parameters are groups of options into one that Typer understands."""
    hints = typing.get_type_hints(command, include_extras=True)
    plain: list[inspect.Parameter] = []
    options: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            options += _parameters(kind)
        else:
            plain.append(_keyword(parameter.name, kind, parameter.default))

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        built = {
            name: kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
            for name, kind in groups.items()
        }
        return command(**values, **built)

    run.__signature__ = inspect.Signature([*plain, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*plain, *options)}
    return run


def _parameters(group: type[Any]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    found = []
    for field in dataclasses.fields(group):
        default = field.default
        if default is dataclasses.MISSING:
            default = (
                inspect.Parameter.empty if field.default_factory is dataclasses.MISSING else field.default_factory()
            )
        found.append(_keyword(field.name, hints[field.name], default))
    return found


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    for extra in getattr(annotation, "__metadata__", ()):
        if isinstance(extra, OptionInfo) and extra.envvar is None:
            extra.envvar = ENVIRONMENT_PREFIX + name.upper()
            extra.show_envvar = False
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
