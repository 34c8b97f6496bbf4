"""Target layers: from what a user types to ids.

Convention: id L is the *output* of element L of the decoder's layer list, 0-based, read by a hook. In most models
that is Transformers' `hidden_states[L + 1]`, in vLLM's and speculators' numbering `L + 1`.
"""

from __future__ import annotations

import itertools

from hiddenq.contracts.errors import ModelError, UsageError

LAYER_CONVENTION = "id L is the output of decoder layer L (0-based, before any final norm); hidden_states[L+1]"
PRESETS = ("eagle3", "dflash", "none")


def resolve_target_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Turn `eagle3`, `dflash`, `none` or `1,17,33` into layer ids, in the order asked.

    Presets, for N layers: `eagle3` is 1, N//2-1, N-4 (Li et al., EAGLE-3, as in SpecForge); `dflash` is five ids
    spread evenly from 1 to N-3; `none` is no layer (only the final state is stored).

    Raises:
        UsageError: the text is neither a preset nor a list of integers, or an id is repeated.
        ModelError: an id is outside 0…N-1, or the model has too few layers for the preset.
    """
    name = text.strip().lower()
    if name == "none":
        return ()
    if name == "eagle3":
        return _strictly_increasing(name, (1, num_layers // 2 - 1, num_layers - 4), num_layers)
    if name == "dflash":
        last = num_layers - 3
        return _strictly_increasing(name, tuple(round(1 + step * (last - 1) / 4) for step in range(5)), num_layers)
    try:
        ids = tuple(int(part) for part in name.split(","))
    except ValueError:
        raise UsageError(
            f"--target-layers {text!r}: expected ids such as 1,17,33 or one of {', '.join(PRESETS)}"
        ) from None
    outside = [layer for layer in ids if not 0 <= layer < num_layers]
    if outside:
        raise ModelError(
            f"--target-layers {text}: layer {outside[0]} does not exist; this model has {num_layers} layers, "
            f"ids 0 to {num_layers - 1} (0 is the first layer's output)"
        )
    if len(set(ids)) != len(ids):
        raise UsageError(f"--target-layers {text}: an id is repeated; name each layer once")
    return ids


def _strictly_increasing(preset: str, ids: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    if ids[0] < 0 or ids[-1] >= num_layers or any(a >= b for a, b in itertools.pairwise(ids)):
        raise ModelError(
            f"--target-layers {preset}: this model has {num_layers} layers, too few for the preset "
            f"(it would give {','.join(map(str, ids))}); name the ids yourself"
        )
    return ids
