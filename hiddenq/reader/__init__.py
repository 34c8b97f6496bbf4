"""Out of the store and into training: open a run, datasets for torch, exports to trainers, verify.

Consumes a run's output location, finished or still going; produces samples, exported sets and reports. Imports
`hiddenq.contracts`, `.storage` and torch, and neither the queue nor Transformers (but where samples are recomputed from
the model, or shown as text, for which it imports `.model_files` and `.dequantized`, too).

    index.py      where each sample lies            headers.py      what a shard says of itself
    run.py        open a run, read a sample         files.py        byte ranges, from anywhere
    decode.py     bytes to tensors                  target_head.py  post-norm states, logits
    dataset.py    map-style dataset, collate        stream.py       iterable dataset
    ahead.py      reading before it is asked for    patience.py     waiting for a store
    checks/       verify: every check of a run      exports/        what trainers load
    trainers.py   datasets in place of theirs       show.py         one sample for a person
    budget.py     a bound on memory                 buffers.py      memory used again
    whole.py      shards against their checksums    remedies.py     what to do about damage
"""

from hiddenq.reader.checks import Finding, VerifyReport, verify
from hiddenq.reader.dataset import HiddenStatesDataset, collate
from hiddenq.reader.decode import Sample
from hiddenq.reader.exports import ExportReport, ExportSettings, export
from hiddenq.reader.run import Run, open_run
from hiddenq.reader.show import show_sample
from hiddenq.reader.stream import HiddenStatesStream

__all__ = [
    "ExportReport",
    "ExportSettings",
    "Finding",
    "HiddenStatesDataset",
    "HiddenStatesStream",
    "Run",
    "Sample",
    "VerifyReport",
    "collate",
    "export",
    "open_run",
    "show_sample",
    "verify",
]
