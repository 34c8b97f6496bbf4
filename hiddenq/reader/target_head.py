"""The target's head, read from a run: post-norm states, logits and embeddings on request.

Invariant: the formulas are those of `hiddenq.contracts.target_head`, which the writer held against the model's own
code; here only the file is checked. The norm is read at once, the two large matrices when they are first needed.

Shape legend: H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from hiddenq.contracts import names
from hiddenq.contracts.errors import DamagedShard, RunMismatch, UsageError
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import TensorSpec, header_num_bytes, parse_header
from hiddenq.contracts.target_head import TargetHead
from hiddenq.reader.decode import torch_dtype
from hiddenq.reader.patience import patiently
from hiddenq.reader.remedies import ADD_HEAD
from hiddenq.storage import ObjectStore

MAX_HEADER_BYTES = 1 << 20
"""It names five tensors at most."""
READ_BYTES = 16 << 20
_TENSORS = {"embed_tokens.weight": 2, "norm.weight": 1, "norm.bias": 1, "lm_head.weight": 2, "lm_head.bias": 1}
"""Tensors that may be there, with their number of axes."""


class HeadWeights:
    """Norm, lm_head and embedding of a run's target."""

    def __init__(self, store: ObjectStore, config: RunConfig) -> None:
        """Read the header and the norm.

        Raises:
            UsageError: the run has no `target_head.safetensors`.
            DamagedShard: it is not what a run writes.
            RunMismatch: it is of another model.
        """
        info = store.stat(names.TARGET_HEAD)
        if info is None:
            raise UsageError(f"{store.uri}: no {names.TARGET_HEAD}, which post-norm states and logits need; {ADD_HEAD}")
        size = header_num_bytes(store.get_bytes(names.TARGET_HEAD, 0, 8), name=names.TARGET_HEAD)
        if size > min(info.num_bytes, MAX_HEADER_BYTES):
            raise DamagedShard(f"{names.TARGET_HEAD}: header of {size} bytes in an object of {info.num_bytes}")
        header = store.get_bytes(names.TARGET_HEAD, 0, size)
        self._specs, metadata = parse_header(header, name=names.TARGET_HEAD, num_bytes=info.num_bytes)
        self._store, self._data_offset = store, size
        self.head = TargetHead.parse(metadata)
        found = (self.head.config_digest, self.head.weights_digest)
        if found != (config.model.config_digest, config.model.weights_digest):
            raise RunMismatch(f"{store.uri}: {names.TARGET_HEAD} is of {self.head.model}, not of the run's model")
        for name, spec in self._specs.items():
            if _TENSORS.get(name) != len(spec.shape) or spec.shape[-1 if name != "lm_head.bias" else 0] < 1:
                raise DamagedShard(f"{names.TARGET_HEAD}: unexpected tensor {name[:40]!r} {list(spec.shape)}")
            if name != "lm_head.bias" and spec.shape[-1] != config.model.hidden_size:
                raise DamagedShard(
                    f"{names.TARGET_HEAD}: {name}: expected {config.model.hidden_size} columns, found {spec.shape[-1]}"
                )
        self._norm_weight, self._norm_bias = self._optional("norm.weight"), self._optional("norm.bias")

    def post_norm(self, final_hidden_state: torch.Tensor) -> torch.Tensor:
        """The final norm's output, [..., H], in the dtype of its input."""
        return self.head.norm.apply(final_hidden_state, self._norm_weight, self._norm_bias)

    def logits(self, final_hidden_state: torch.Tensor) -> torch.Tensor:
        """The model's logits [..., V] for a final hidden state [..., H], in its dtype."""
        normed = self.post_norm(final_hidden_state)
        bias = self._lm_head_bias
        raw = torch.nn.functional.linear(
            normed, self.lm_head.to(normed.dtype), None if bias is None else bias.to(normed.dtype)
        )
        return self.head.finish_logits(raw)

    @functools.cached_property
    def embedding(self) -> torch.Tensor:
        """`embed_tokens.weight` [V, H], without `embedding_scale`."""
        return self._read("embed_tokens.weight")

    @functools.cached_property
    def lm_head(self) -> torch.Tensor:
        """`lm_head.weight` [V, H]."""
        return self.embedding if self.head.tied else self._read("lm_head.weight")

    @functools.cached_property
    def _lm_head_bias(self) -> torch.Tensor | None:
        return self._optional("lm_head.bias")

    def verify(self) -> None:
        """Read every byte and hold it against the checksum that the head was written with.

        Raises:
            DamagedShard: they differ.
        """
        found = self.head.checksum_of(
            (name, spec.dtype, spec.shape, self._pieces(spec)) for name, spec in sorted(self._specs.items())
        )
        if found != self.head.checksum:
            raise DamagedShard(f"{names.TARGET_HEAD}: checksum: expected {self.head.checksum}, found {found}")

    def _pieces(self, spec: TensorSpec) -> Iterator[bytes]:
        end = self._data_offset + spec.end
        for begin in range(self._data_offset + spec.begin, end, READ_BYTES):
            yield patiently()(self._store.get_bytes, names.TARGET_HEAD, begin, min(begin + READ_BYTES, end))

    def _optional(self, name: str) -> torch.Tensor | None:
        return self._read(name) if name in self._specs else None

    def _read(self, name: str) -> torch.Tensor:
        spec: TensorSpec | None = self._specs.get(name)
        if spec is None:
            raise DamagedShard(f"{names.TARGET_HEAD}: {name} is missing")
        begin, end = self._data_offset + spec.begin, self._data_offset + spec.end
        data = self._store.get_bytes(names.TARGET_HEAD, begin, end)
        if len(data) != end - begin:
            raise DamagedShard(f"{names.TARGET_HEAD}: {name}: expected {end - begin} bytes, found {len(data)}")
        with torch.inference_mode(False):  # it is kept, and may serve training later
            return torch.frombuffer(bytearray(data), dtype=torch_dtype(spec.dtype)).view(spec.shape)
