"""What a model does between its last layer and its logits, found by trying.

Invariant: nothing is believed of an architecture. The model's own code runs with all its layers taken out, so that
final norm and lm_head see inputs chosen here; the kind of norm, epsilon, scales and softcap are those that reproduce
its output, and a model that none reproduces is refused.

Shape legend: P probe tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from hiddenq.contracts.errors import ModelError
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.target_head import NormSpec, TargetHead

PROBE_TOKENS = 8
LARGE_LOGIT = 25.0
"""Size of the logits that show a softcap; those in use are 15 to 50."""
EXACT = 1e-4
"""Relative difference that float32 rounding explains."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def take_layers_out(model: nn.Module) -> None:
    """Empty every outermost list of modules: embedding, final norm and head are left."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for name in lists:
        if not any(name.startswith(f"{outer}.") for outer in lists):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.ModuleList())


@torch.no_grad()
def describe_head(model: Any, config: RunConfig) -> tuple[TargetHead, dict[str, Tensor]]:
    """What the head of a model without layers does, proved on it, and its tensors in the run's dtype.

    Args:
        model: a causal model in float32, its layers taken out.

    Raises:
        ModelError: no norm, scale and softcap that are known give the model's output.
    """
    probe = _Probe(model)
    dtype = _DTYPES[config.model.dtype]
    norm = _fit_norm(probe, dtype)
    scale, softcap = _fit_logits(probe)
    embedding = model.get_input_embeddings().weight
    head = TargetHead(
        model=config.model.model,
        config_digest=config.model.config_digest,
        weights_digest=config.model.weights_digest,
        architecture=config.model.architecture,
        model_type=model.config.get_text_config().model_type,
        norm=norm,
        logit_scale=scale,
        logit_softcap=softcap,
        embedding_scale=_factor(embedding[probe.ids], probe.entry_PH, probe.numbers),
        tied=probe.lm_head.weight is embedding,
    )
    tensors = {
        "embed_tokens.weight": embedding,
        "norm.weight": probe.norm_weight,
        "norm.bias": probe.norm_bias,
        "lm_head.weight": None if head.tied else probe.lm_head.weight,
        "lm_head.bias": probe.lm_head.bias,
    }
    return head, {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items() if tensor is not None}


class _Probe:
    """A model without layers whose final norm's output can be replaced."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.name = type(model).__name__
        self.lm_head: Any = model.get_output_embeddings()
        self.ids = torch.arange(1, PROBE_TOKENS + 1)
        self.numbers = sorted({float(value) for value in _leaves(model.config.to_dict()) if 0 < value < 1e6})
        """Every positive number of the config: scales and softcaps are among them, whatever they are called."""
        calls: list[tuple[nn.Module, Tensor]] = []
        handles = [
            module.register_forward_hook(lambda module, args, _output: calls.append((module, args[0])))
            for module in model.modules()
            if not list(module.children())
        ]
        try:
            self._forward()
        finally:
            for handle in handles:
                handle.remove()
        before_head = itertools.takewhile(lambda call: call[0] is not self.lm_head, calls)
        norms = [call for call in before_head if "norm" in type(call[0]).__name__.lower()]
        if not norms:
            raise ModelError(f"--target-head: {self.name}: no final norm was called before lm_head")
        self.norm, entry_1PH = norms[-1]
        self.entry_PH = entry_1PH[0]
        """The decoder's entry: without layers it is the norm's input."""
        self.norm_weight: Tensor | None = getattr(self.norm, "weight", None)
        self.norm_bias: Tensor | None = getattr(self.norm, "bias", None)

    def inputs(self) -> Tensor:
        """States of many sizes that are not centred, so that epsilon and mean show."""
        sizes_P1 = torch.logspace(-3, 2, PROBE_TOKENS)[:, None]
        noise_PH = torch.randn(self.entry_PH.shape, generator=torch.Generator().manual_seed(0))
        return (noise_PH + 0.3) * sizes_P1

    def logits(self, normed_PH: Tensor) -> Tensor:
        """The model's logits when its final norm gives `normed_PH`."""
        handle = self.norm.register_forward_hook(lambda _module, _args, _output: normed_PH[None])
        try:
            return self._forward()
        finally:
            handle.remove()

    def _forward(self) -> Tensor:
        logits_PV: Tensor = self.model(input_ids=self.ids[None], use_cache=False).logits[0]
        return logits_PV


def _fit_norm(probe: _Probe, dtype: torch.dtype) -> NormSpec:
    """The norm that gives what the module gives: first in float32, then how it rounds in the run's dtype."""
    hidden_PH = probe.inputs()
    wanted_PH = probe.norm(hidden_PH[None])[0]
    epsilons = {value for value in probe.numbers if value < 1e-2} | {0.0, torch.finfo(torch.float32).eps, 1e-6, 1e-5}
    epsilons |= {value for value in vars(probe.norm).values() if isinstance(value, float) and 0 < value < 1e-2}
    specs = [
        NormSpec(kind=kind, epsilon=epsilon, weight_offset=offset, scale_in_float32=True)
        for kind in ("rms", "layer")
        for offset in (0, 1)
        for epsilon in sorted(epsilons)
    ]  # fmt: skip

    def error(spec: NormSpec) -> float:
        return _apart(spec.apply(hidden_PH, probe.norm_weight, probe.norm_bias), wanted_PH)

    best = min(specs, key=error)
    if error(best) > EXACT:
        raise ModelError(
            f"--target-head: {probe.name}: its final norm, {type(probe.norm).__name__}, is neither an RMS norm nor a "
            f"layer norm that is known here (nearest: {best.kind}, off by {error(best):.1g})"
        )
    narrow_PH = hidden_PH.to(dtype)
    rounded_PH = probe.norm.to(dtype)(narrow_PH[None])[0].float()
    probe.norm.to(torch.float32)

    def rounding(spec: NormSpec) -> float:
        weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in (probe.norm_weight, probe.norm_bias))
        return float((spec.apply(narrow_PH, weight, bias).float() - rounded_PH).abs().sum())

    return min((best, best.model_copy(update={"scale_in_float32": False})), key=rounding)


def _fit_logits(probe: _Probe) -> tuple[float, float | None]:
    """Scale and softcap that turn lm_head's output into the model's logits."""
    normed_PH = torch.randn(probe.entry_PH.shape, generator=torch.Generator().manual_seed(1))
    weight_VH, bias_V = probe.lm_head.weight, probe.lm_head.bias
    normed_PH *= LARGE_LOGIT / float((probe.logits(normed_PH * 1e-3) * 1e3).std())
    raw_PV = nn.functional.linear(normed_PH, weight_VH, bias_V)
    wanted_PV = probe.logits(normed_PH)
    largest = float(wanted_PV.abs().max())  # is the softcap itself where tanh is 1 in float32
    softcaps = [None, *(value for value in probe.numbers if value >= largest * (1 - EXACT))]
    for softcap in softcaps:
        unsure = wanted_PV.abs() > 0.9 * (softcap or float("inf"))
        uncapped_PV = wanted_PV if softcap is None else (wanted_PV / softcap).atanh() * softcap
        scale = _factor(raw_PV[~unsure], uncapped_PV[~unsure], probe.numbers)
        if scale is None:
            continue
        scaled_PV = raw_PV * scale
        given_PV = scaled_PV if softcap is None else (scaled_PV / softcap).tanh() * softcap
        if _apart(given_PV, wanted_PV) <= EXACT:
            return scale, softcap
    raise ModelError(f"--target-head: {probe.name}: no scale and softcap turn lm_head's output into its logits")


def _factor(source: Tensor, result: Tensor, numbers: list[float]) -> float | None:
    """f with f · source = result, as the config states it or its inverse where it does; None if there is none."""
    if source.shape != result.shape or not source.numel():
        return None
    factor = float((source * result).sum() / (source * source).sum())
    if _apart(source * factor, result) > EXACT:
        return None
    known = [1.0, *numbers, *(1 / number for number in numbers)]
    nearest = min(known, key=lambda number: abs(number - factor))
    return nearest if abs(nearest - factor) <= EXACT * abs(factor) else factor


def _apart(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest value of its row."""
    if found.ndim < 2:
        found, wanted = found[None], wanted[None]
    size = wanted.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return float(((found - wanted).abs() / size).max())


def _leaves(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in _leaves(inner)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []
