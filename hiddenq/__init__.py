"""hiddenq: hidden states of a language model over a whole dataset, through a queue, into an object store.

    import hiddenq
    run = hiddenq.open_run("s3://bucket/run")
    sample = run[42]                              # .input_ids .loss_mask .hidden_states .final_hidden_state
    dataset = hiddenq.HiddenStatesDataset(run)    # a torch Dataset; its DataLoader takes collate_fn=hiddenq.collate

Everything else is under the `hiddenq` command.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hiddenq.reader import HiddenStatesDataset, collate, open_run

__version__ = "0.1.0"
__all__ = ["HiddenStatesDataset", "__version__", "collate", "open_run"]


def __getattr__(name: str) -> Any:
    if name in ("open_run", "HiddenStatesDataset", "collate"):
        return getattr(importlib.import_module("hiddenq.reader"), name)  # torch only for those who read
    raise AttributeError(f"module 'hiddenq' has no attribute {name!r}")
