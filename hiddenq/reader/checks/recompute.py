"""Compute samples from the model again, with plain Transformers, and compare.

Invariant: nothing of the GPU worker is used: the model is the class that its own checkpoint names, run on one sample
alone, without padding, batch or cut-off; states are read by hooks, as the layer ids are defined. So agreement here
means that the stored states are the model's, in the layers and for the tokens that the run states.

Shape legend: S tokens, K target layers, H hidden size.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.quantizers.auto import AutoQuantizationConfig

from hiddenq.contracts.errors import HiddenqError, ModelError, UsageError, words_of
from hiddenq.contracts.run import RunConfig
from hiddenq.dequantized import cast_rest
from hiddenq.model_files import place_of
from hiddenq.reader.checks.report import Findings, Recomputed
from hiddenq.reader.decode import TORCH_DTYPES, Sample
from hiddenq.reader.run import Run

TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
"""Relative difference of a token's state that other kernels and another batch explain, by the model's dtype: one unit
in the last place (2^-8 for bfloat16) grows to this over several dozen layers, while another layer, token or sample
differs by 0.3 to 1.4."""
FP8_TOLERANCE = 4e-2
"""What fp8 storage adds: half a step of 1/8 at most, about 0.03 over a vector."""
QUANTILE = 0.95
"""Of a sample's tokens this share must lie within the tolerance: a router may send a single token elsewhere."""


def recompute_samples(
    run: Run, number: int, *, model: str | None, device: str, seed: int | None, findings: Findings
) -> Recomputed | None:
    """Recompute `number` random samples; add those that differ to `findings`.

    Raises:
        ModelError: the model can't be loaded here or is not the run's.
        UsageError: there is no such device.
    """
    config = run.config
    name = place_of(model or config.model.model)
    chosen = random.Random(seed).sample(run.sample_ids.tolist(), min(number, len(run)))
    if not chosen:
        return None
    chosen.sort(key=lambda sample_id: run.lengths[run.index.position(sample_id)])  # dynamic rotary scales never shrink
    tolerance = TOLERANCE[config.model.dtype] + (FP8_TOLERANCE if run.shard_format.has_scales else 0.0)
    network = _load(name, config, device)
    worst = (-1.0, -1, "")
    for sample_id in chosen:
        try:
            sample = run.read(sample_id, torch.float32)
        except HiddenqError as error:
            findings.add("recompute", f"sample {sample_id}", f"can't be read: {error}")
            continue
        for layer, difference in _differences(network, sample, config).items():
            worst = max(worst, (difference, sample_id, layer))
            if not difference <= tolerance:
                text = f"{layer}: differs from the model's by {difference:.2g}; up to {tolerance:.0e} is accepted"
                findings.add("recompute", f"sample {sample_id}", text)
    return Recomputed(
        num_samples=len(chosen),
        tolerance=tolerance,
        worst_difference=worst[0],
        worst_sample=worst[1],
        worst_layer=worst[2],
        model=name,
    )


def _load(name: str, config: RunConfig, device: str) -> Any:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device}: {words_of(error)}") from error
    try:
        model_config = transformers.AutoConfig.from_pretrained(name, revision=config.model.revision)
        named = next(iter(model_config.architectures or []), "")
        cls = getattr(transformers, named, transformers.AutoModelForCausalLM)
        with _bars_of_downloads_alone(name):
            network = cls.from_pretrained(
                name,
                revision=config.model.revision,
                dtype=TORCH_DTYPES[config.model.dtype],
                device_map=None,
                use_safetensors=True,
                **_quantization(model_config, config),
            )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"--recompute: {name} can't be loaded: {words_of(error)}; say where it lies with --model"
        ) from error
    if config.model.dequantized:
        cast_rest(network, TORCH_DTYPES[config.model.dtype])
    if config.model.quantization and _is_dequantized(network) != config.model.dequantized:
        raise ModelError(
            f"--recompute: the run used the {config.model.quantization} weights natively, which this machine can't "
            "(kernels or GPU capability are missing); verify with --recompute on one that can"
        )
    return network.to(device).eval()


@contextlib.contextmanager
def _bars_of_downloads_alone(name: str) -> Iterator[None]:
    """Transformers shows no progress for a model that lies in a folder, which takes seconds."""
    bars = transformers.utils.logging
    is_silenced = Path(name).is_dir() and bars.is_progress_bar_enabled()
    if is_silenced:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        if is_silenced:
            bars.enable_progress_bar()


def _quantization(model_config: Any, config: RunConfig) -> dict[str, Any]:
    """Arguments that load a quantised checkpoint as the run did."""
    if not config.model.dequantized:
        return {}
    fields = model_config.quantization_config
    fields = fields if isinstance(fields, dict) else fields.to_dict()
    return {"quantization_config": AutoQuantizationConfig.from_dict(fields | {"dequantize": True})}


def _is_dequantized(network: Any) -> bool:
    quantizer = getattr(network, "hf_quantizer", None)
    return quantizer is None or bool(getattr(quantizer.quantization_config, "dequantize", False))


def _layers(network: Any, config: RunConfig) -> tuple[Any, torch.nn.ModuleList]:
    """The decoder and its list of layers: the outermost list of as many modules as the run says."""
    decoder = network.get_decoder() if hasattr(network, "get_decoder") else network
    lists = [
        (name.count("."), module)
        for name, module in decoder.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.model.num_layers
    ]
    if not lists:
        raise ModelError(
            f"--recompute: {type(network).__name__} has no list of {config.model.num_layers} layers, as the run's "
            f"{config.model.architecture} had; name the run's model with --model"
        )
    return decoder, min(lists, key=lambda entry: entry[0])[1]


@torch.no_grad()
def _differences(network: Any, sample: Sample, config: RunConfig) -> dict[str, float]:
    """By layer: how far the sample's stored states are from the model's."""
    decoder, layers = _layers(network, config)
    last = config.model.num_layers - 1
    wanted = set(config.target_layer_ids) | ({last} if config.final_hidden_state else set())
    with _recorded(layers, wanted) as outputs:
        decoder(input_ids=sample.input_ids[None].to(network.device), use_cache=False)
    found = {
        f"layer {layer}": _distance(sample.hidden_states[:, slot], outputs[layer])
        for slot, layer in enumerate(config.target_layer_ids)
        if sample.hidden_states is not None
    }
    if sample.final_hidden_state is not None:
        found["the final state"] = _distance(sample.final_hidden_state, outputs[last])
    return found


def _distance(stored_SH: torch.Tensor, model_SH: torch.Tensor) -> float:
    """95th percentile over tokens of |stored - model| / |model|; infinite if the shapes differ."""
    if stored_SH.shape != model_SH.shape:
        return float("inf")
    apart_S = (stored_SH - model_SH).norm(dim=-1) / model_SH.norm(dim=-1).clamp(min=1e-12)
    return float(torch.nan_to_num(apart_S, nan=float("inf")).quantile(QUANTILE))


@contextlib.contextmanager
def _recorded(layers: torch.nn.ModuleList, wanted: set[int]) -> Iterator[dict[int, torch.Tensor]]:
    outputs: dict[int, torch.Tensor] = {}

    def hook(layer: int) -> Any:
        def record(_module: Any, _args: Any, output: Any) -> None:
            hidden_1SH = output[0] if isinstance(output, tuple) else output
            outputs[layer] = hidden_1SH[0].float().cpu()

        return record

    handles = [layers[layer].register_forward_hook(hook(layer)) for layer in sorted(wanted)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
