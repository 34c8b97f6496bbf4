"""`target_head.safetensors`: what turns a final hidden state into the model's logits, as numbers.

Invariant: the formulas stand here once, for the writer, which holds them against the model's own code before anything
is written, and for every reader. They use methods of tensors only, so nothing here imports torch.

Tensors: `embed_tokens.weight` [V, H]; `norm.weight` and `norm.bias` [H] where the norm has them; `lm_head.weight`
[V, H] unless it is the embedding itself, `lm_head.bias` [V] if there is one. The metadata key `hiddenq` holds a
`TargetHead`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from hiddenq.contracts.base import Frozen, Versioned
from hiddenq.contracts.checksum import Crc64Nvme

if TYPE_CHECKING:
    from torch import Tensor


class NormSpec(Frozen):
    """The final norm."""

    kind: Literal["rms", "layer"]
    """`rms`: x / sqrt(mean(x²) + ε); `layer`: the mean is subtracted first."""
    epsilon: float = Field(ge=0)
    weight_offset: Literal[0, 1]
    """What is added to the stored weight (1 in Gemma's norms)."""
    scale_in_float32: bool
    """Whether weight and bias are applied before the result is rounded to the model's dtype."""

    def apply(self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The norm of [..., H], in the dtype it came in; `weight` and `bias` are [H], None where the norm has none."""
        normed = hidden.float()
        if self.kind == "layer":
            normed = normed - normed.mean(-1, keepdim=True)
        normed = normed * (normed.pow(2).mean(-1, keepdim=True) + self.epsilon).rsqrt()
        if not self.scale_in_float32:
            normed = normed.to(hidden.dtype)
        if weight is not None:
            normed = normed * (self.weight_offset + weight.to(normed.dtype))
        if bias is not None:
            normed = normed + bias.to(normed.dtype)
        return normed.to(hidden.dtype)


class TargetHead(Versioned):
    """How the tensors are used."""

    schema_version: int = 1
    model: str
    config_digest: str
    weights_digest: str
    architecture: str
    model_type: str
    """Transformers' name of the (text) model's kind, such as `qwen3`."""
    norm: NormSpec
    logit_scale: float
    """Factor on lm_head's output, before the softcap (Cohere, Granite, MiniCPM, Falcon-H1)."""
    logit_softcap: float | None
    """c in c·tanh(logits / c); None without one (Gemma 2, NanoChat)."""
    embedding_scale: float | None
    """Factor on an embedding's row at the decoder's entry; None where more than a factor happens to it."""
    tied: bool
    """Whether lm_head's weight is the embedding."""
    checksum: str = ""
    """Over all the rest of the file: see `checksum_of`."""

    def checksum_of(self, tensors: Iterable[tuple[str, str, tuple[int, ...], Iterable[Any]]]) -> str:
        """The checksum of this record (without it) and of the tensors: name, safetensors dtype, shape, pieces of bytes.

        Tensors come in the order of their names.
        """
        crc = Crc64Nvme()
        crc.update(self.model_copy(update={"checksum": ""}).to_json().encode())
        for name, dtype, shape, pieces in tensors:
            crc.update(f"{name} {dtype} {list(shape)}".encode())
            for piece in pieces:
                crc.update(piece)
        return crc.value

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Scale and softcap of lm_head's output."""
        scaled = logits * self.logit_scale if self.logit_scale != 1.0 else logits
        if self.logit_softcap is None:
            return scaled
        return (scaled / self.logit_softcap).tanh() * self.logit_softcap
