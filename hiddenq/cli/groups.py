"""The option groups: what each stage can be told, in the words of the command line.

Invariant: a group only names options and turns them into the stage's own settings, which check them; a default stands
in the settings, once, and here again only where help shows it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hiddenq.contracts.errors import UsageError
from hiddenq.storage import StoreSettings

if TYPE_CHECKING:
    from producer import ProducerSettings

MODEL_PANEL = "Model and states"
_MODEL, _DATA, _STORE, _REDIS, _HOST = MODEL_PANEL, "Data", "Store", "Queue", "This machine"


def _option(
    panel: str,
    *names: str,
    text: str,
    metavar: str | None = None,
    least: int | None = None,
    variable: str | None = None,
) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, min=least, envvar=variable, rich_help_panel=panel)


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """What is extracted: model, data, layers, lengths."""

    model: Annotated[str, _option(_MODEL, text="Folder or hub id of the target model.")]
    data: Annotated[
        list[str],
        _option(
            _DATA,
            text="Files, globs, folders, s3:// URIs or hub datasets; more of them may follow as plain arguments.",
            metavar="FILE",
        ),
    ]
    revision: Annotated[str | None, _option(_MODEL, text="Branch, tag or commit of a hub model.")] = None
    target_layers: Annotated[
        str, _option(_MODEL, text="Layer ids such as 1,17,33 (0-based outputs), or eagle3, dflash, none.")
    ] = "eagle3"
    final_state: Annotated[
        bool,
        _option(
            _MODEL, "--final-state/--no-final-state", text="Also store the last layer's output, before the final norm."
        ),
    ] = True
    dtype: Annotated[
        str, _option(_MODEL, text="Dtype of the forward pass: auto (the model's own), bfloat16, float16, float32.")
    ] = "auto"
    dequantize: Annotated[
        bool, _option(_MODEL, text="Run a quantised checkpoint in the forward pass's dtype, not natively.")
    ] = False
    storage_dtype: Annotated[
        str | None,
        _option(
            _MODEL,
            text="Dtype of the stored states: bfloat16, float16, float32 or float8_e4m3fn; by default --dtype's.",
        ),
    ] = None
    max_length: Annotated[
        int | None,
        _option(_DATA, text="The longest sample, in tokens; by default what model and --token-budget allow."),
    ] = None
    length_policy: Annotated[str, _option(_DATA, text="What happens to a longer one: truncate or drop.")] = "truncate"
    token_budget: Annotated[int, _option(_DATA, text="The most padded tokens in a batch.")] = 32768
    max_shard_bytes: Annotated[int, _option(_DATA, text="The largest shard, in bytes.")] = 1 << 30
    max_rejected: Annotated[float, _option(_DATA, text="The share of rows that may be rejected, 0 to 1.")] = 0.1
    limit: Annotated[int | None, _option(_DATA, text="Read only the first so many rows.")] = None
    shuffle_seed: Annotated[
        int | None, _option(_DATA, text="Shuffle within bands of similar length, by this seed.")
    ] = None
    row_schema: Annotated[
        str,
        _option(_DATA, text="What a row is: auto, messages, conversations, prompt_completion, text or input_ids."),
    ] = "auto"
    chat_template: Annotated[
        Path | None, _option(_DATA, text="File with a Jinja chat template to use instead of the tokenizer's own.")
    ] = None
    template_arguments: Annotated[
        str | None, _option(_DATA, text="JSON arguments of the chat template, such as '{\"enable_thinking\": false}'.")
    ] = None
    special_tokens: Annotated[
        str, _option(_DATA, text="Special-token text typed by a user: count, escape or reject.")
    ] = "count"
    surrogates: Annotated[str, _option(_DATA, text="Unpaired surrogates in a text: replace or reject.")] = "replace"
    processes: Annotated[int | None, _option(_HOST, text="Tokenising processes; one a core by default.")] = None
    trust_remote_code: Annotated[bool, _option(_MODEL, text="Run Python code that comes with the model.")] = False
    run: Annotated[
        str | None,
        _option(_DATA, text="Name of the run; the last part of --out by default.", variable="HIDDENQ_RUN_NAME"),
    ] = None

    def settings(self, more_data: list[str], run_name: str) -> ProducerSettings:
        """The producer's settings, checked."""
        from producer import ProducerSettings

        fields = {name: value for name, value in vars(self).items() if name not in ("data", "final_state")}
        fields["template_arguments"] = _json_object("--template-arguments", self.template_arguments)
        fields["run"] = self.run or run_name
        return ProducerSettings(data=(*self.data, *more_data), final_hidden_state=self.final_state, **fields)


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How the output location is reached; credentials come from the environment alone."""

    endpoint_url: Annotated[str | None, _option(_STORE, text="S3-compatible server; AWS by default.")] = None
    region: Annotated[str | None, _option(_STORE, text="Region of the bucket.")] = None
    addressing_style: Annotated[str, _option(_STORE, text="auto, path or virtual.")] = "auto"
    profile: Annotated[str | None, _option(_STORE, text="Profile in this machine's AWS configuration.")] = None
    sse: Annotated[str | None, _option(_STORE, text="Server-side encryption: AES256, aws:kms or aws:kms:dsse.")] = None
    sse_kms_key_id: Annotated[str | None, _option(_STORE, text="KMS key for it.")] = None
    storage_class: Annotated[str | None, _option(_STORE, text="Storage class of the shards.")] = None
    request_payer: Annotated[bool, _option(_STORE, text="The requester pays.")] = False
    bandwidth: Annotated[
        int | None,
        _option(_STORE, text="The most bytes a second that each host's uploaders send, together.", least=1),
    ] = None
    part_bytes: Annotated[
        int,
        _option(
            _STORE, text="The smallest part of an upload; larger ones are fewer requests to the store.", least=5 << 20
        ),
    ] = 16 << 20
    checksums: Annotated[
        str, _option(_STORE, text="auto (probed), crc64nvme (the store must verify) or metadata (read back).")
    ] = "auto"

    @property
    def settings(self) -> StoreSettings:
        """The store's settings, checked."""
        fields = {**vars(self), "bandwidth_bytes_per_second": self.bandwidth}
        del fields["bandwidth"]
        return StoreSettings(**fields)


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """Where the queue is."""

    redis_url: Annotated[
        str | None,
        _option(
            _REDIS,
            text="redis://HOST:PORT/0 or rediss://…; the password comes from HIDDENQ_REDIS_PASSWORD or the file named "
            "by HIDDENQ_REDIS_PASSWORD_FILE.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """What a host runs, and where it keeps finished shards."""

    devices: Annotated[str, _option(_HOST, text="auto, cpu, cuda (all GPUs) or a list such as cuda:0,cuda:1.")] = "auto"
    spool: Annotated[
        Path | None,
        _option(
            _HOST,
            text="Folder for finished shards that wait for upload; may be RAM-backed. By default OUT/.hiddenq/spool of "
            "a `run`, else ~/.local/state/hiddenq/spool.",
        ),
    ] = None
    spool_bytes: Annotated[
        int | None, _option(_HOST, text="High mark of the spool: workers pause above so many bytes.")
    ] = None
    uploaders: Annotated[int, _option(_HOST, text="Uploader processes.", metavar="N", least=1)] = 2
    metrics_port: Annotated[
        int,
        _option(
            _HOST, text="Base port for /metrics; each process adds its number; a taken one is passed over; 0: none."
        ),
    ] = 0
    metrics_bind: Annotated[str, _option(_HOST, text="Address that /metrics listens on.")] = "127.0.0.1"

    def arguments(self) -> tuple[str, ...]:
        """What workers and uploaders are told alike, as arguments."""
        given = ["--metrics-port", str(self.metrics_port), "--metrics-bind", self.metrics_bind]
        given += ["--spool-bytes", str(self.spool_bytes)] if self.spool_bytes is not None else []
        return tuple(given)


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """How a GPU worker computes; none of it changes what is stored."""

    attention: Annotated[str, _option(_HOST, text="Attention kernel; auto takes the fastest the model supports.")] = (
        "auto"
    )
    compile: Annotated[str, _option(_HOST, text="auto or off.")] = "auto"
    require_fast_kernels: Annotated[
        bool, _option(_HOST, text="Refuse a hybrid model whose fast kernels are missing here.")
    ] = False
    gpus_per_worker: Annotated[int, _option(_HOST, text="GPUs that share one copy of the model.", metavar="N")] = 1
    cpu_threads: Annotated[int | None, _option(_HOST, text="Torch threads on the CPU.")] = None
    fsync: Annotated[bool, _option(_HOST, text="Force each shard to disk before it is published.")] = False

    def arguments(self) -> tuple[str, ...]:
        """The same options as arguments of `hiddenq worker`."""
        given = [
            "--attention",
            self.attention,
            "--compile",
            self.compile,
            "--gpus-per-worker",
            str(self.gpus_per_worker),
        ]
        given += ["--require-fast-kernels"] * self.require_fast_kernels
        given += ["--fsync"] * self.fsync
        given += ["--cpu-threads", str(self.cpu_threads)] if self.cpu_threads is not None else []
        return tuple(given)


@dataclass(frozen=True, kw_only=True)
class UploadOptions:
    """What an uploader is told beside its spool."""

    nice: Annotated[int, _option(_HOST, text="Added to the niceness of uploaders.")] = 10
    keep_local: Annotated[
        Path | None, _option(_HOST, text="Folder that gets a copy of every committed shard.", metavar="FOLDER")
    ] = None
    allowed_prefix: Annotated[
        str | None, _option(_HOST, text="Refuse runs whose location does not lie below this one.", metavar="URI")
    ] = None

    def arguments(self) -> tuple[str, ...]:
        """The same options as arguments."""
        given = ["--nice", str(self.nice)]
        given += ["--keep-local", str(self.keep_local)] if self.keep_local else []
        given += ["--allowed-prefix", self.allowed_prefix] if self.allowed_prefix else []
        return tuple(given)


def _json_object(option: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except ValueError as error:
        raise UsageError(f"{option}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{option}: expected a JSON object, found {type(value).__name__}")
    return value
