"""The producer: any conversation dataset in; token parts, loss masks and length-bucketed batches out.

Consumes dataset files, a model's config and tokenizer. Produces `tokens/`, `rejected.jsonl` and `run.json` in the
output location, and a `BatchJob` a batch in the extract queue. Imports `hiddenq.contracts`, `.storage`,
`.delivery` and `.model_identity`; never torch, never another stage.

A row's way: `sources` reads it, `conversation` checks it, `chat` renders and tokenises it, `mask` says what is
supervised, `pool` does the three in parallel, `spill` keeps the tokens on disk, `batching` orders and cuts them,
`parts` writes them out.
"""

from producer.job import Progress
from producer.prepare import Prepared, prepare
from producer.report import PlanReport, plan
from producer.settings import ProducerSettings

__all__ = ["PlanReport", "Prepared", "ProducerSettings", "Progress", "plan", "prepare"]
