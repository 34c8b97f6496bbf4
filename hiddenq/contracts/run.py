"""`run.json`: one model, one dataset, one configuration, one output location.

Invariant: it is written once, after the token parts and the batch list are complete, and never changed; so its
presence means that the plan is whole, and two starts that disagree with it in a field that decides the output are
different runs. What a host decides (kernels, GPU, compile) is not here but in each shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from hiddenq.contracts.base import Frozen, Versioned
from hiddenq.contracts.layers import LAYER_CONVENTION
from hiddenq.contracts.messages import RunId

Dtype = Literal["bfloat16", "float16", "float32"]
StorageDtype = Literal["bfloat16", "float16", "float32", "float8_e4m3fn"]


class ModelIdentity(Frozen):
    """The target model, as far as it decides the states."""

    model: str
    """Path or hub id, as given."""
    revision: str | None
    """Hub commit, or None for a local folder."""
    config_digest: str
    """blake2b-128 over the model's config without fields that don't decide the states."""
    weights_digest: str
    """blake2b-128 over names, sizes and a sample of the bytes of the weight files (local), or the hub commit."""
    architecture: str
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    max_positions: int | None
    """Positions the model was made for; None where it has no limit."""
    dtype: Dtype
    """The dtype the forward pass runs in."""
    quantization: str | None
    """Quantisation method of the checkpoint, None if it has none."""
    dequantized: bool = False
    """Whether a quantised checkpoint is run in `dtype`, its weights turned back while loading, instead of natively."""


class DataFile(Frozen):
    """One input file."""

    name: str
    num_bytes: int
    digest: str
    """blake2b-128 of its bytes."""


class DatasetIdentity(Frozen):
    """The input rows."""

    files: tuple[DataFile, ...]
    row_schema: str
    """`messages`, `conversations`, `prompt_completion`, `text` or `input_ids`."""
    fingerprint: str
    """blake2b-128 over the files' digests and everything that decides how a row is read."""
    limit: int | None
    """Only the first so many rows are read; None for all."""


class TokenizerIdentity(Frozen):
    """What turns a row into ids and a loss mask."""

    digest: str
    """blake2b-128 over the tokenizer's files; empty if rows are token ids already."""
    chat_template_digest: str
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    policies: dict[str, Any] = Field(default_factory=dict)
    """How odd rows are treated (surrogates, special tokens typed by users, …); version of the mask rule."""


class RunConfig(Versioned):
    """The content of `run.json`."""

    schema_version: int = 1
    run: RunId
    hiddenq_version: str
    created_at: str
    """UTC, ISO 8601."""
    model: ModelIdentity
    dataset: DatasetIdentity
    tokenizer: TokenizerIdentity
    layer_convention: str = LAYER_CONVENTION
    target_layer_ids: tuple[int, ...]
    final_hidden_state: bool
    """Whether the last decoder layer's output, before the final norm, is stored too."""
    storage_dtype: StorageDtype
    max_length: int = Field(ge=1)
    """The longest sample, in tokens."""
    length_policy: Literal["truncate", "drop"]
    token_budget: int = Field(ge=1)
    """The most padded tokens a batch holds."""
    max_shard_bytes: int = Field(ge=1)
    shuffle_seed: int | None
    num_rows: int
    num_rejected: int
    num_samples: int
    num_tokens: int
    num_supervised: int
    num_padded_tokens: int
    num_batches: int
    num_token_parts: int
    plan_digest: str
    """blake2b-128 over the token parts and the batch list."""

    def differences(self, other: RunConfig) -> list[Difference]:
        """Fields that decide the output and differ, by dotted name; `self` is the one already there."""
        mine, theirs = self.model_dump(mode="json"), other.model_dump(mode="json")
        for fields in (mine, theirs):
            for name in INFORMATIONAL:
                fields.pop(name)
            fields["model"].pop("model")
            for file in fields["dataset"]["files"]:
                file.pop("name")
        return list(_differences("", mine, theirs))


INFORMATIONAL = ("run", "hiddenq_version", "created_at")
"""Fields of `run.json` that do not decide the output. Names of model and data files do not either: digests do."""


@dataclass(frozen=True)
class Difference:
    """One field in which two runs differ."""

    field: str
    existing: Any
    requested: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.existing!r} there, {self.requested!r} asked for"


def _differences(prefix: str, existing: Any, requested: Any) -> list[Difference]:
    if isinstance(existing, dict) and isinstance(requested, dict):
        found: list[Difference] = []
        for name in sorted(existing.keys() | requested.keys()):
            found += _differences(f"{prefix}.{name}" if prefix else name, existing.get(name), requested.get(name))
        return found
    return [] if existing == requested else [Difference(prefix, existing, requested)]
