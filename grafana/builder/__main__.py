"""`python -m grafana.builder` writes every generated file; with `--check` it only says which are stale (exit 1)."""

from __future__ import annotations

import sys

from grafana.builder.files import ROOT, generated_files


def main(arguments: list[str]) -> int:
    """Write, or compare."""
    stale = []
    for name, text in generated_files().items():
        path = ROOT / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name in stale:
        print(f"grafana/{name}: {'stale: run `python -m grafana.builder`' if '--check' in arguments else 'written'}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
