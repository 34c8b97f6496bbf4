"""The producer: any conversation dataset in; token parts, loss masks and length-bucketed batches out.

Consumes dataset files, a model's config and tokenizer. Produces `tokens/`, `rejected.jsonl` and `run.json` in the
output location; `hiddenq.produce` enqueues the batches listed there. Imports `hiddenq.contracts`, `.storage`,
`.telemetry`, `.model_identity` and `.model_files`; never torch, never another stage.

A row's way: `sources` finds its file and `formats` reads it, `conversation` checks it, `rendering` makes one string of
it, `tokenizer` its ids, `mask` says what is supervised, `encoder` does these for a block of rows and `pool` for several
at once; `spill` keeps the tokens on disk, `order` sorts them, `batching` cuts them, `parts` writes them out.
"""

from producer.job import Progress
from producer.prepare import Prepared, prepare
from producer.report import PlanReport, plan
from producer.settings import ProducerSettings

__all__ = ["PlanReport", "Prepared", "ProducerSettings", "Progress", "plan", "prepare"]
