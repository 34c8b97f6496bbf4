"""What a producer is asked to do.

Invariant: everything that decides ids, masks or batches is a field here or a byte of the inputs; so two producers with
equal settings and inputs write the same bytes, whatever the machine and the number of processes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hiddenq.contracts.base import Frozen
from hiddenq.contracts.errors import UsageError
from hiddenq.contracts.run import StorageDtype
from hiddenq.model_identity import AskedDtype

RowSchema = Literal["messages", "conversations", "prompt_completion", "text", "input_ids"]


class ProducerSettings(Frozen):
    """Settings of `plan`, `produce` and the first half of `run`."""

    model: str
    """Folder or hub id of the target model."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; None for its main branch."""
    data: tuple[str, ...]
    """Files, globs, folders, `s3://` URIs or hub datasets (`owner/name[:config][:split]`), in the order of the rows."""
    target_layers: str = "eagle3"
    """Layer ids such as `1,17,33`, or a preset: `eagle3`, `dflash`, `none`."""
    dtype: AskedDtype = "auto"
    """Dtype of the forward pass; `auto` is the one in the model's config."""
    dequantize: bool = False
    """Run a quantised checkpoint in `dtype`, not natively."""
    storage_dtype: StorageDtype | None = None
    """Dtype in which states are stored; None for the dtype of the forward pass."""
    final_hidden_state: bool = True
    """Whether the last layer's output, before the final norm, is stored too."""
    max_length: int | None = Field(default=None, ge=1)
    """The longest sample, in tokens; None for the most that model, token budget and shard size allow."""
    length_policy: Literal["truncate", "drop"] = "truncate"
    """What happens to a longer one: its end is cut off, or it is rejected as `too_long`."""
    token_budget: int = Field(default=32768, ge=1)
    """The most padded tokens in a batch."""
    max_shard_bytes: int = Field(default=1 << 30, ge=1 << 16)
    """The largest shard, in bytes."""
    max_rejected: float = Field(default=0.1, ge=0, le=1)
    """The share of rows that may be rejected."""
    limit: int | None = Field(default=None, ge=1)
    """Only the first so many rows are read; None for all."""
    shuffle_seed: int | None = Field(default=None, ge=0)
    """Seed of a shuffle within bands of similar length; None for strictly longest first."""
    row_schema: Literal["auto"] | RowSchema = "auto"
    """What a row looks like; `auto` finds out from the first rows."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as `{"enable_thinking": false}`."""
    chat_template: Path | None = None
    """File with a Jinja chat template to use instead of the tokenizer's own."""
    special_tokens: Literal["count", "escape", "reject"] = "count"
    """What happens where a row's text spells one of the tokenizer's special tokens."""
    surrogates: Literal["replace", "reject"] = "replace"
    """What happens to unpaired surrogates: U+FFFD in their place, or the row is rejected as `bad_text`; always the
    latter where the arguments of a tool call escape one."""
    processes: int | None = Field(default=None, ge=1)
    """Tokenising processes; None for one a usable core."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    run: str | None = None
    """Name of the run; None for the last part of the output location."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.data:
            raise UsageError("--data: name at least one file, folder or dataset")
        if self.max_length is not None and self.max_length > self.token_budget:
            raise UsageError(
                f"--max-length {self.max_length}: one such sample would not fit --token-budget {self.token_budget}; "
                "raise the budget or lower the length"
            )
        if self.row_schema in ("text", "input_ids"):
            for option, given in (
                ("chat-template", self.chat_template),
                ("template-arguments", self.template_arguments),
            ):
                if given:
                    raise UsageError(f"--{option}: has no effect on rows of {self.row_schema}; leave it out")
        return self

    @property
    def num_processes(self) -> int:
        """Tokenising processes to use."""
        return self.processes or len(os.sched_getaffinity(0))
