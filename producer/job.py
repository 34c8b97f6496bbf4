"""What a producer is about to do, made out from settings and inputs before anything heavy runs.

Invariant: whatever a user can get wrong (layers, model, files, schema, template, lengths) is refused here, in the
order of what it costs to find out, before the first row is tokenised.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from hiddenq.contracts.errors import DatasetError, UsageError
from hiddenq.contracts.layers import resolve_target_layers
from hiddenq.contracts.run import DatasetIdentity, TokenizerIdentity
from hiddenq.contracts.shard import ShardFormat
from hiddenq.model_identity import identify_model
from hiddenq.telemetry import logger
from producer.batching import BatchLimits, RotaryLimits
from producer.blocks import Suspect
from producer.conversation import detect_schema
from producer.encoder import Encoder, EncoderSettings
from producer.formats import read_blocks
from producer.mask import MASK_RULE
from producer.pool import encode_blocks
from producer.rejects import RowRejected
from producer.samples import EncodedBlock
from producer.settings import ProducerSettings, RowSchema
from producer.sources import check_named, digest_files, resolve_data
from producer.tokenizer import TokenizerSource

ROW_RULE = 1
"""Version of how a row is read and judged; part of the dataset's fingerprint."""
_SMALL_BYTES = 4 << 20
"""Input of up to so many bytes is tokenised sooner than a pool has started."""
_ROWS_LOOKED_AT = 1000

Progress = Callable[[str, int, int], None]
"""Hears of a stage's name, what is done and what there is to do: bytes of input, samples, or shards."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Tell nobody."""


class Job:
    """A producer's work, as far as it is known before tokenising. Holds a scratch folder: use it as a context."""

    def __init__(self, settings: ProducerSettings, progress: Progress = no_progress) -> None:
        """Look at model, layers, files, schema and tokenizer.

        Raises:
            UserError: something of the user's to mend, in one line.
        """
        self.settings = settings
        self._progress = progress
        self._exit = ExitStack()
        try:
            self._open()
        except BaseException:
            self._exit.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def _open(self) -> None:
        settings = self.settings
        check_named(settings.data)
        self.target = identify_model(
            settings.model,
            revision=settings.revision,
            dtype=settings.dtype,
            trust_remote_code=settings.trust_remote_code,
            dequantize=settings.dequantize,
        )
        model = self.target.identity
        self.target_layer_ids = resolve_target_layers(settings.target_layers, model.num_layers)
        if not self.target_layer_ids and not settings.final_hidden_state:
            raise UsageError("--target-layers none --no-final-state: nothing would be stored; name a layer")
        self.shard = ShardFormat(
            target_layer_ids=self.target_layer_ids,
            hidden_size=model.hidden_size,
            model_dtype=model.dtype,
            storage_dtype=settings.storage_dtype or model.dtype,
            final_hidden_state=settings.final_hidden_state,
        )
        self.limits = BatchLimits.of(
            token_budget=settings.token_budget,
            max_shard_bytes=settings.max_shard_bytes,
            shard=self.shard,
            rotary=RotaryLimits.of(self.target.text_config),
        )
        self.max_length = self._max_length()
        self._scratch: Path | None = None
        self.files = resolve_data(settings.data, self.scratch)
        self.num_bytes = sum(file.path.stat().st_size for file in self.files)
        self.row_schema = self._row_schema()
        source = None if self.row_schema == "input_ids" else TokenizerSource.of(settings, self.target)
        self.encoder_settings = EncoderSettings(
            row_schema=self.row_schema,
            tokenizer=source,
            vocab_size=model.vocab_size,
            max_length=self.max_length,
            length_policy=settings.length_policy,
            special_tokens=settings.special_tokens,
            surrogates=settings.surrogates,
        )
        self._encoder = Encoder(self.encoder_settings)
        self.tokenizer = self._tokenizer_identity(source)
        if self.tokenizer.chat_template_digest and self._encoder.chat and self._encoder.chat.template.writes_date:
            logger().warning(
                "template_may_write_the_date",
                next="name a fixed date in the template arguments (often date_string) for the same tokens on any day",
            )
        logger().info(
            "input_understood",
            row_schema=self.row_schema,
            files=len(self.files),
            num_bytes=self.num_bytes,
            max_length=self.max_length,
            target_layer_ids=self.target_layer_ids,
        )

    def scratch(self) -> Path:
        """A folder for this job's temporary files, below `TMPDIR`."""
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="hiddenq-"))
            self._exit.callback(shutil.rmtree, self._scratch, ignore_errors=True)
        return self._scratch

    def dataset(self) -> DatasetIdentity:
        """The input's identity; reads every byte of it."""
        files = digest_files(self.files, lambda done: self._progress("reading", done, self.num_bytes))
        digest = hashlib.blake2b(digest_size=16)
        for decisive in (ROW_RULE, self.row_schema, self.settings.limit, *(file.digest for file in files)):
            digest.update(f"{decisive}\0".encode())
        return DatasetIdentity(
            files=files, row_schema=self.row_schema, fingerprint=digest.hexdigest(), limit=self.settings.limit
        )

    def encode(self) -> Iterator[EncodedBlock]:
        """All rows, block by block, in order."""
        blocks = read_blocks(self.files, self.settings.limit)
        is_small = self.num_bytes < _SMALL_BYTES and self.settings.processes is None
        num_processes = 1 if is_small else self.settings.num_processes
        for block, encoded in encode_blocks(blocks, self._encoder, self.encoder_settings, num_processes):
            self._progress("tokenising", block.num_bytes_read, self.num_bytes)
            yield encoded

    def check_rejects(self, num_rows: int, reasons: Counter[str]) -> None:
        """Refuse an input of which too much is left out.

        Raises:
            DatasetError: more than `max_rejected`, or nothing left.
        """
        num_rejected = reasons.total()
        counts = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        if not num_rows:
            raise DatasetError(f"--data {' '.join(self.settings.data)}: no rows in it")
        if num_rejected == num_rows:
            raise DatasetError(f"all {num_rows} rows rejected: {counts}; see them with hiddenq plan")
        if num_rejected > self.settings.max_rejected * num_rows:
            raise DatasetError(
                f"{num_rejected} of {num_rows} rows rejected, more than --max-rejected {self.settings.max_rejected:g} "
                f"allows: {counts}; see them with hiddenq plan"
            )

    def _max_length(self) -> int:
        """The longest sample: what is asked for, bounded by what model, budget and shard size allow."""
        asked, model, fits = self.settings.max_length, self.target.identity.max_positions, self.limits.max_sample_tokens
        if fits < 1 or (asked is not None and min(asked, model or asked) > fits):
            raise UsageError(
                f"--max-shard-bytes {self.settings.max_shard_bytes}: a sample of {asked or 1} tokens would not fit "
                f"({self.limits.bytes_per_token} bytes a token, so {max(fits, 0)} tokens at most); raise it"
            )
        return min(bound for bound in (asked, model, fits) if bound is not None)

    def _row_schema(self) -> RowSchema:
        if self.settings.row_schema != "auto":
            return self.settings.row_schema
        named = f"--data {' '.join(self.settings.data)}"
        refused: list[RowRejected] = []
        schema, columns = detect_schema(self._first_values(refused))
        if schema is not None:
            return schema
        if columns:
            found = f"columns found: {', '.join(columns)}"
        elif refused:
            found = f"none of the first rows is a JSON object: {refused[0].detail}"
        else:
            raise DatasetError(f"{named}: no rows in it")
        raise DatasetError(
            f"{named}: no schema fits; {found}; expected one of {', '.join(get_args(RowSchema))} "
            "(prompt_completion: columns prompt and completion)"
        )

    def _first_values(self, refused: list[RowRejected]) -> Iterator[dict[Any, Any]]:
        """The first rows that are objects; the first of the others goes to `refused`."""
        for block in read_blocks(self.files, _ROWS_LOOKED_AT):
            for value in block.decode():
                value = value.value if isinstance(value, Suspect) else value
                if isinstance(value, dict):
                    yield value
                elif not refused:
                    is_refused = isinstance(value, RowRejected)
                    refused.append(value if is_refused else RowRejected("not_an_object", f"{type(value).__name__}"))

    def _tokenizer_identity(self, source: TokenizerSource | None) -> TokenizerIdentity:
        settings = self.settings
        policies = {
            "mask_rule": MASK_RULE,
            "special_tokens": settings.special_tokens,
            "surrogates": settings.surrogates,
        }
        return TokenizerIdentity(
            digest=source.digest() if source is not None else "",
            chat_template_digest=self._template_digest(),
            template_arguments=settings.template_arguments,
            policies=policies,
        )

    def _template_digest(self) -> str:
        """Of the chat template that rows may be rendered by; empty if there is none."""
        chat = self._encoder.chat
        if chat is None or self.row_schema == "text":
            return ""
        try:
            return hashlib.blake2b(chat.template.text.encode(), digest_size=16).hexdigest()
        except UsageError:
            if self.row_schema == "prompt_completion":  # whose rows may all be text
                return ""
            raise
