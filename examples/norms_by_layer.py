"""Plot the norms of a run's states by layer: how large they are, and how they vary over tokens.

    python examples/norms_by_layer.py s3://bucket/run norms.svg [--samples 64]

Massive activations (a first token a thousand times larger than the rest) show as the upper whisker. The plot is an SVG
written by hand, so the example needs nothing beyond hiddenq's reader.
"""

from __future__ import annotations

import argparse
from html import escape
from itertools import islice
from pathlib import Path

import torch

import hiddenq
from hiddenq.reader import HiddenStatesStream
from hiddenq.reader.show import layer_norms

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
WIDTH, HEIGHT, MARGIN = 640, 360, 56


def main() -> None:
    """Read some random samples, gather the norms, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("svg", type=Path)
    parser.add_argument("--samples", type=int, default=64)
    arguments = parser.parse_args()
    run = hiddenq.open_run(arguments.run)
    norms: dict[str, list[torch.Tensor]] = {}
    for sample in islice(HiddenStatesStream(run, dtype=torch.float32), arguments.samples):
        for layer, values in layer_norms(sample, run.target_layer_ids).items():
            norms.setdefault(layer, []).append(values)
    quantiles = {layer: torch.cat(values).quantile(torch.tensor(QUANTILES)).tolist() for layer, values in norms.items()}
    arguments.svg.write_text(draw(f"{run.config.model.architecture}: norms of the states by layer", quantiles))
    for layer, (low, _, median, _, high) in quantiles.items():
        print(f"{layer:10} median {median:10.4g}   1 % {low:10.4g}   99 % {high:10.4g}")


def draw(title: str, quantiles: dict[str, list[float]]) -> str:
    """Box plots beside each other, on a logarithmic axis."""
    logs: dict[str, list[float]] = {
        layer: torch.tensor(values).clamp(min=1e-6).log10().tolist() for layer, values in quantiles.items()
    }
    bottom = min(values[0] for values in logs.values()) - 0.1
    top = max(values[-1] for values in logs.values()) + 0.1

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (value - bottom) / (top - bottom) * (HEIGHT - 2 * MARGIN)

    step = (WIDTH - 2 * MARGIN) / len(logs)
    shapes = [f'<text x="{WIDTH / 2}" y="24" text-anchor="middle" font-size="15">{escape(title)}</text>']
    for number, (layer, (low, lower, median, upper, high)) in enumerate(logs.items()):
        x = MARGIN + (number + 0.5) * step
        half = min(20, step / 3)
        shapes += [
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}" stroke="#444"/>',
            f'<rect x="{x - half:.1f}" y="{y(upper):.1f}" width="{2 * half:.1f}" '
            f'height="{y(lower) - y(upper):.1f}" fill="#8ab" stroke="#444"/>',
            f'<line x1="{x - half:.1f}" x2="{x + half:.1f}" y1="{y(median):.1f}" y2="{y(median):.1f}" '
            'stroke="#c33" stroke-width="2"/>',
            f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{escape(layer)}</text>',
            f'<text x="{x + half + 3:.1f}" y="{y(median) + 4:.1f}" font-size="10">{10**median:.3g}</text>',
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(shapes)}</svg>\n'
    )


if __name__ == "__main__":
    main()
