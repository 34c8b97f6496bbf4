"""One forward pass of the decoder, each wanted layer's output put into the shard's bytes as it appears.

Invariant: after `run` every stored column of every row was written exactly once, or an error was raised: the hooks are
counted, and each output's shape is checked. Nothing above the last layer needed is run, no head, no logits; nothing
waits for the device.

Shape legend: B rows, S padded tokens, H hidden size, C stored columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpu_worker.decoder import Decoder, first_tensor
from gpu_worker.gather import Column, Destination, WrongStates, columns_of, store_states, store_tokens
from gpu_worker.inputs import DeviceBatch, PaddedBatch
from gpu_worker.rotary import forgetting
from hiddenq.contracts.errors import ModelError
from hiddenq.contracts.shard import ShardFormat


class Extractor:
    """A decoder with hooks on the layers that a run stores."""

    def __init__(self, decoder: Decoder, shard_format: ShardFormat, *, masked: bool = False) -> None:
        if decoder.hidden_size != shard_format.hidden_size:
            raise ModelError(
                f"the model's layers give {decoder.hidden_size} values a token, the run expects "
                f"{shard_format.hidden_size}; is it the run's model?"
            )
        self.decoder = decoder
        self.shard_format = shard_format
        self.columns: tuple[Column, ...] = columns_of(shard_format)
        self.masked = masked
        """Whether padding is masked: only for a model in which right padding changes real tokens otherwise."""
        last = decoder.num_layers - 1
        wanted = list(shard_format.target_layer_ids) + ([last] if shard_format.final_hidden_state else [])
        check_layers(shard_format.target_layer_ids, decoder.num_layers)
        self._last_needed = max(wanted, default=last)
        self._forget_lengths = forgetting(decoder.model)
        self._wanted: dict[int, list[int]] = {}
        for column, layer in enumerate(wanted):
            self._wanted.setdefault(layer, []).append(column)
        self._batch: DeviceBatch | None = None
        self._stored: list[int] = []
        self._handles = [
            decoder.layers[layer].register_forward_hook(self._hook(layer))
            for layer in sorted({*self._wanted, self._last_needed})
        ]

    def for_format(self, shard_format: ShardFormat) -> Extractor:
        """Hooks for another run on the same decoder, run the same way."""
        return Extractor(self.decoder, shard_format, masked=self.masked)

    def close(self) -> None:
        """Take the hooks off the layers."""
        for handle in self._handles:
            handle.remove()

    def upload(self, batch: PaddedBatch, payload: Tensor) -> DeviceBatch:
        """Copy a batch to the device (without waiting); `payload` uint8 is where its bytes will be."""
        device = self.decoder.device
        lengths_B = batch.lengths_B.to(payload.device, non_blocking=True)
        destination = Destination(
            payload=payload[: batch.num_bytes],
            lengths_B=lengths_B,
            begins_B=batch.begins_B.to(payload.device, non_blocking=True),
            nonfinite_CB=torch.zeros(len(self.columns), batch.num_rows, dtype=torch.int32, device=payload.device),
            bytes_per_token=self.shard_format.bytes_per_token,
            host_lengths=batch.lengths,
            host_begins=batch.begins,
        )
        ids_BS = batch.input_ids_BS.to(device, non_blocking=True).long()
        store_tokens(ids_BS.to(payload.device), batch.loss_mask_BS.to(payload.device, non_blocking=True), destination)
        positions_BS = batch.positions_BS.to(device, non_blocking=True).long()
        mask_BS = None
        if self.masked:
            steps = torch.arange(batch.padded_length, device=device)
            mask_BS = (steps[None, :] < lengths_B.to(device)[:, None]).long()
        return DeviceBatch(input_ids_BS=ids_BS, positions_BS=positions_BS, mask_BS=mask_BS, destination=destination)

    def run(self, batch: DeviceBatch) -> None:
        """Run the decoder over a batch; its states are in the payload when the device gets there.

        Raises:
            WrongStates: a layer gave another shape, or not every column was written.
        """
        inputs: dict[str, Any] = {"input_ids": batch.input_ids_BS, "use_cache": False}
        if self.decoder.takes_positions:
            inputs["position_ids"] = batch.positions_BS
        if batch.mask_BS is not None:
            inputs["attention_mask"] = batch.mask_BS
        self._batch, self._stored = batch, []
        self._forget_lengths()
        try:
            with torch.inference_mode(), stopping_early():
                self.decoder.model(**inputs)
        finally:
            self._batch = None
        expected = list(range(len(self.columns)))
        if sorted(self._stored) != expected:
            raise WrongStates(f"expected stored columns {expected}, found {sorted(self._stored)}")

    def _hook(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            batch = self._batch
            if batch is None:
                return
            states_BSH = first_tensor(output)
            self._check(layer, states_BSH, batch)
            for column in self._wanted.get(layer, ()):
                store_states(
                    self.columns[column], column, states_BSH.to(batch.destination.payload.device), batch.destination
                )
                self._stored.append(column)
            if layer == self._last_needed:
                raise _Enough

        return hook

    def _check(self, layer: int, states_BSH: Any, batch: DeviceBatch) -> None:
        expected = (*batch.input_ids_BS.shape, self.decoder.hidden_size)
        found = tuple(states_BSH.shape) if isinstance(states_BSH, Tensor) else type(states_BSH).__name__
        if found != expected:
            raise WrongStates(f"layer {layer}: expected states of shape {expected}, found {found}")


def check_layers(target_layer_ids: tuple[int, ...], num_layers: int) -> None:
    """Refuse layers that the model does not have.

    Raises:
        ModelError: an id is not one of the model's layers.
    """
    outside = [layer for layer in target_layer_ids if not 0 <= layer < num_layers]
    if outside:
        raise ModelError(
            f"--target-layers: layer {outside[0]} does not exist; this model has {num_layers} layers, ids 0 to "
            f"{num_layers - 1} (0 is the first layer's output)"
        )


class _Enough(Exception):
    """The last layer needed has given its output."""


@contextmanager
def stopping_early() -> Iterator[None]:
    """Let a hook end the forward pass once there is nothing left to read."""
    try:
        yield
    except _Enough:
        return
