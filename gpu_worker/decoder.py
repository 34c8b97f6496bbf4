"""Where a model's decoder layers are, proved rather than believed.

Invariant: a `Decoder` exists only if one forward pass showed that its layers are called once each, in order, with one
[B, S, H] stream between them, and that their outputs are what Transformers itself reports. Names and declarations in
models are hints (nine names for the final norm, layer counts that lie): they choose what to try, never what to trust.

Shape legend: B rows, S padded tokens, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hiddenq.contracts.errors import ModelError, words_of

PROBE_ROWS, PROBE_TOKENS = 2, 12
_CANDIDATES_SHOWN, _CHARACTERS_SHOWN = 2, 120
"""Lists of layers in an error, likeliest first, and of what each of them showed."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A causal decoder whose layers were found."""

    model: nn.Module
    """Called with `input_ids`; has no head."""
    layers: nn.ModuleList
    norm: nn.Module | None
    """The final norm; None where the last layer's output is the model's."""
    hidden_size: int
    takes_positions: bool
    """Whether `position_ids` may be given: it exists and 0, 1, 2, … means what leaving it out means."""

    @property
    def num_layers(self) -> int:
        """Layers there are, whatever the config says."""
        return len(self.layers)

    @property
    def device(self) -> torch.device:
        """Where its input goes."""
        return next(self.model.parameters()).device


def count_layers(model: nn.Module) -> int:
    """Layers of a model that can't run (on the meta device, say): those of the likeliest layer list.

    Raises:
        ModelError: it has no list of layers.
    """
    for _, layers in _candidates(model):
        return len(layers)
    raise ModelError(f"{type(model).__name__}: no list of decoder layers found")


@torch.inference_mode()
def find_decoder(model: nn.Module, vocab_size: int) -> Decoder:
    """Find the decoder's layers and final norm, and prove them by a forward pass.

    Raises:
        ModelError: no list of layers fits; the text says what was found.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (PROBE_ROWS, PROBE_TOKENS), generator=generator).to(device)
    refusals: list[str] = []
    for name, layers in _candidates(model):
        try:
            return _prove(model, layers, ids)
        except _NotProved as refusal:
            refusals.append(f"{name} ({len(layers)} × {type(layers[0]).__name__}): {refusal}")
    found = "; ".join(refusals[:_CANDIDATES_SHOWN]) or "no list of layers"
    raise ModelError(f"{type(model).__name__} is not supported: its decoder layers could not be proved: {found}")


def first_tensor(output: Any) -> Any:
    """A layer's hidden states: its output, or the first of the tuple or list that some layers return."""
    return output[0] if isinstance(output, (tuple, list)) else output


class _NotProved(Exception):
    """What a forward pass showed instead."""


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """Lists of layers, likeliest first: those whose classes the model declares, outermost first."""
    declared = set(getattr(model, "_no_split_modules", None) or ())
    recorded = getattr(model, "_can_record_outputs", None)
    for recorder in recorded.values() if isinstance(recorded, dict) else ():
        for target in recorder if isinstance(recorder, list) else [recorder]:
            declared.add(getattr(getattr(target, "target_class", target), "__name__", ""))
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and not _inside(model, name)
    ]

    def rank(item: tuple[str, nn.ModuleList]) -> tuple[bool, int, int]:
        name, module = item
        known = all(type(layer).__name__ in declared for layer in module)
        return (not known, name.count("."), -len(module))

    yield from sorted(lists, key=rank)


def _inside(model: nn.Module, name: str) -> bool:
    """Whether a module list lies within another one."""
    parts = name.split(".")
    return any(isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList) for end in range(1, len(parts)))


def _prove(model: nn.Module, layers: nn.ModuleList, ids: Tensor) -> Decoder:
    probe = _Probe(model, layers, ids.device)
    with probe:
        output = _forward(model, input_ids=ids, output_hidden_states=True)
    order = [index for index, _ in probe.outputs]
    if order != list(range(len(layers))):
        raise _NotProved(f"layers were called in the order {words_of(order, _CHARACTERS_SHOWN)}")
    states = [_one_stream(states, ids) for _, states in probe.outputs]
    hidden_size = states[0].shape[-1]
    if any(layer.shape[-1] != hidden_size for layer in states):
        raise _NotProved(f"hidden sizes differ: {sorted({layer.shape[-1] for layer in states})}")
    _compare_with_reported(states, getattr(output, "hidden_states", None))
    norm = probe.norm_of(states[-1], output.last_hidden_state)
    if norm is None and not torch.equal(states[-1], output.last_hidden_state):
        raise _NotProved("no norm takes the last layer's output and gives last_hidden_state")
    return Decoder(
        model=model,
        layers=layers,
        norm=norm,
        hidden_size=hidden_size,
        takes_positions=_takes_positions(model, ids, output.last_hidden_state),
    )


def _forward(model: nn.Module, **inputs: Tensor | bool) -> Any:
    """The model's output; one that can't run on token ids alone is not proved, a broken device is no trait of it."""
    try:
        return model(**inputs, use_cache=False, return_dict=True)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {words_of(error, _CHARACTERS_SHOWN)}"
        raise _NotProved(f"it does not run on token ids alone: {said}") from error


def _one_stream(states: Any, ids: Tensor) -> Tensor:
    if not isinstance(states, Tensor):
        raise _NotProved(f"a layer returns {type(states).__name__}")
    if states.dim() == 4:
        raise _NotProved(
            f"a layer returns several streams, shape {list(states.shape)}; hiddenq stores one [B, S, H] stream a layer"
        )
    if states.dim() != 3 or states.shape[:2] != ids.shape:
        raise _NotProved(f"a layer returns shape {list(states.shape)} for input {list(ids.shape)}")
    return states


def _compare_with_reported(states: list[Tensor], reported: tuple[Tensor, ...] | None) -> None:
    """The hooks' outputs equal `hidden_states`, shifted by 1 (embeddings first) or 0; the last may be post-norm."""
    if not reported:
        raise _NotProved("the model reports no hidden_states to compare with")
    for shift in (1, 0):
        pairs = [(states[layer], layer + shift) for layer in range(len(states) - 1)]
        if all(place < len(reported) and torch.equal(mine, reported[place]) for mine, place in pairs):
            return
    raise _NotProved(f"the outputs of its {len(states)} layers are not the {len(reported)} hidden_states reported")


def _takes_positions(model: nn.Module, ids: Tensor, expected: Tensor) -> bool:
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    found = _forward(model, input_ids=ids, position_ids=positions).last_hidden_state
    return torch.allclose(found.float(), expected.float(), rtol=1e-3, atol=1e-3 * float(expected.float().abs().max()))


class _Probe:
    """Hooks for one forward pass: what each layer gave, and what every other module took and gave.

    Everything is copied to `home`, the device of the model's output: layers can lie on several.
    """

    def __init__(self, model: nn.Module, layers: nn.ModuleList, home: torch.device) -> None:
        self.outputs: list[tuple[int, Any]] = []
        self._norms: list[tuple[nn.Module, Tensor, Tensor]] = []
        self._model, self._layers, self._home = model, layers, home
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        inner = {id(module) for layer in self._layers for module in layer.modules()}
        for index, layer in enumerate(self._layers):
            self._handles.append(layer.register_forward_hook(self._layer_hook(index)))
        for module in self._model.modules():
            if id(module) not in inner and module is not self._model:
                self._handles.append(module.register_forward_hook(self._other_hook))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def norm_of(self, last_BSH: Tensor, final_BSH: Tensor) -> nn.Module | None:
        """The module that took the last layer's output and gave the model's."""
        for module, taken, given in self._norms:
            if given.shape == final_BSH.shape and torch.equal(given, final_BSH) and torch.equal(taken, last_BSH):
                return module
        return None

    def _layer_hook(self, index: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            states = first_tensor(output)
            self.outputs.append((index, self._copy(states) if isinstance(states, Tensor) else states))

        return hook

    def _other_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
        given = first_tensor(output)
        if (
            self.outputs
            and inputs
            and isinstance(inputs[0], Tensor)
            and isinstance(given, Tensor)
            and inputs[0].shape == given.shape
        ):
            self._norms.append((module, self._copy(inputs[0]), self._copy(given)))

    def _copy(self, states: Tensor) -> Tensor:
        return states.to(self._home, copy=True)
