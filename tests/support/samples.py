"""What tests of whole runs read of a sample.

Invariant: a run that should have stored both kinds of states and did not fails here, before anything is compared.

Shape legend: S tokens of a sample, K target layers, H hidden size.
"""

from __future__ import annotations

import torch

from hiddenq.reader import Sample


def both_states(sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Its hidden states [S, K, H] and its final hidden state [S, H]; fails where one of them was not stored."""
    assert sample.hidden_states is not None, sample.sample_id
    assert sample.final_hidden_state is not None, sample.sample_id
    return sample.hidden_states, sample.final_hidden_state
