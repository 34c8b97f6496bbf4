"""The base of every value that crosses a process: frozen, strict about its fields, versioned.

Invariant: a value read from outside is either exactly what its class declares or an error that names both
versions, because unknown fields are refused and `schema_version` is looked at before anything else.
"""

from __future__ import annotations

import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from hiddenq.contracts.errors import BadMessage, UnknownSchema


class Frozen(BaseModel):
    """An immutable value; unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Versioned(Frozen):
    """A frozen value with a `schema_version`, read from and written to JSON.

    Subclasses give `schema_version` a default: the version that this code writes and understands.
    """

    schema_version: int

    @classmethod
    def supported_version(cls) -> int:
        """The schema version that this code writes and reads."""
        return int(cls.model_fields["schema_version"].default)

    @classmethod
    def parse(cls, raw: bytes | str | dict[str, Any]) -> Self:
        """Read a value from JSON text or from a decoded mapping.

        Raises:
            UnknownSchema: its version is not the one this code knows.
            BadMessage: it is not JSON, not a value of this class, or has no version.
        """
        try:
            fields = raw if isinstance(raw, dict) else json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"{cls.__name__}: not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise BadMessage(f"{cls.__name__}: expected an object, found {type(fields).__name__}")
        found = fields.get("schema_version")
        if type(found) is not int:
            raise BadMessage(f"{cls.__name__}: schema_version: expected a whole number, found {str(found)[:80]!r}")
        if found != cls.supported_version():
            raise UnknownSchema(
                f"{cls.__name__}: schema version {found!r} found, this hiddenq knows {cls.supported_version()}; "
                "use the same hiddenq everywhere"
            )
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "value"
            raise BadMessage(f"{cls.__name__}: {where}: {first['msg']}") from error

    def to_json(self) -> str:
        """The value as one compact line of JSON."""
        return self.model_dump_json()
