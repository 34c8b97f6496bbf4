"""Every error that hiddenq raises on purpose.

Invariant: the class alone says what happens next (try again, give up on this batch, tell the user), so no
caller ever looks into a message to decide. Each text says what, which id, what was expected, what was found.

    HiddenqError
    ├── RetryableError              the same work may succeed later
    │   ├── RedisAway               Redis unreachable, loading, full or read-only: wait, charge nobody
    │   ├── SpoolAway               the spool's disk is full or read-only: wait, charge nobody
    │   ├── StoreAway               the store as a whole: timeouts, 5xx, throttling, expired token; charge nobody
    │   └── TransientError          this one job: try again, and count the attempt
    └── PermanentError              trying again changes nothing
        ├── UserError               the user's to mend: one line, exit status 2
        │   ├── UsageError          flags and settings
        │   │   └── SpoolGone       the spool's folder is another one now: unmounted, or something mounted over it
        │   ├── DatasetError        input that can't be read, a schema nobody knows, too many rejects
        │   ├── ModelError          missing model or weights, unsupported architecture, layer ids
        │   ├── StoreRefused        no such bucket, no permission, wrong region
        │   │   └── ObjectTooLarge  this one object: the store takes smaller ones
        │   ├── RedisRefused        wrong password, wrong version, an eviction policy that drops jobs
        │   ├── RunMismatch         the location belongs to another run, or to a running one
        │   └── UnknownSchema       a message or file of a newer hiddenq
        ├── BadMessage              a message that breaks the contract: dead letter, nothing runs
        ├── DamagedShard            bytes differ from what was recorded: quarantine, make it again
        ├── MissingShard            the file is gone: make it again
        ├── ObjectMissing           the store has no object of that key
        ├── NonFiniteStates         NaN or Inf where a sample's real tokens are
        └── LeaseLost               another execution owns this batch now: drop the work, delete the file
"""

from __future__ import annotations


def words_of(error: object, max_characters: int = 300) -> str:
    """What an error of another package says, on one line that fits into ours; its class if it says nothing."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= max_characters else f"{said[:max_characters]} …"


class HiddenqError(Exception):
    """Root of the tree; `exit_status` is what the command returns when nothing handles it."""

    exit_status = 3


class RetryableError(HiddenqError):
    """The same work may succeed later."""

    exit_status = 1


class RedisAway(RetryableError):
    """Redis can't be reached or refuses to work for now."""


class SpoolAway(RetryableError):
    """The spool's disk can't be written for now."""


class StoreAway(RetryableError):
    """The object store as a whole can't be used for now."""


class TransientError(RetryableError):
    """One job failed in a way that another attempt may mend."""


class PermanentError(HiddenqError):
    """Trying again changes nothing."""

    exit_status = 1


class UserError(PermanentError):
    """The user's to mend: printed as one line, without a traceback."""

    exit_status = 2


class UsageError(UserError):
    """Flags or settings that can't be."""


class SpoolGone(UsageError):
    """What lies where the spool was opened is another folder now, which says nothing about the spool's shards."""


class DatasetError(UserError):
    """Input rows that can't be read or understood, or too many of them rejected."""


class ModelError(UserError):
    """A model that is missing, incomplete or of an unsupported kind, or layer ids it does not have."""


class StoreRefused(UserError):
    """The object store answered, and said no."""


class ObjectTooLarge(StoreRefused):
    """The object store takes no object of this size; smaller ones it may take."""


class RedisRefused(UserError):
    """Redis answered, and can't be used as it is."""


class RunMismatch(UserError):
    """The output location belongs to another run, or another process is running it."""


class UnknownSchema(UserError):
    """A message or file written by a newer hiddenq than this one."""


class BadMessage(PermanentError):
    """A message that breaks the contract."""


class DamagedShard(PermanentError):
    """A shard whose bytes are not those that were recorded."""


class MissingShard(PermanentError):
    """A shard whose file is gone."""


class ObjectMissing(PermanentError):
    """There is no object of that key in the store."""


class NonFiniteStates(PermanentError):
    """NaN or Inf in the states of a real token."""


class LeaseLost(PermanentError):
    """Another execution owns this batch now."""
