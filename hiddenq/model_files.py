"""What lies in a checkpoint's folder: whether it is a whole model, its weight files, and a digest of them.

Invariant: a folder that can't be loaded is refused by what lies in it, in one line, before anything of it is loaded:
pickles and GGUF, an adapter, a file that the index names and that is missing, a pointer that Git LFS left behind.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from hiddenq.contracts.errors import ModelError

_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
"""Weights that are never loaded: most are pickles, which run code."""
_INDEX = "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 16
_NAMES_SHOWN = 3


def is_path(model: str) -> bool:
    """Whether a name can only be meant as a folder: a hub id is `name` or `owner/name`."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model


def check_here(model: str, *, was_folder: bool = False) -> None:
    """Refuse a folder that this host has not, in words of ours: Transformers would take its path for a hub id.

    Raises:
        ModelError: the name can only be a folder's, or is recorded as one's, and there is none.
    """
    if (was_folder or is_path(model)) and not Path(model).expanduser().is_dir():
        raise ModelError(f"--model {model}: no such folder on this host")


def place_of(model: str) -> str:
    """What Transformers can open: a folder's path without `~`, a hub id as it is."""
    folder = Path(model).expanduser()
    return str(folder) if folder.is_dir() else model


def check_folder(model: str, folder: Path) -> None:
    """Refuse a folder that is no Transformers checkpoint of a whole model; its weights are `weight_files`' to check.

    Raises:
        ModelError: it is an adapter, or holds no config.
    """
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"--model {model}: the folder holds an adapter (adapter_config.json), not a whole model; merge it into its "
            "base model, save that, and name its folder"
        )
    if not (folder / "config.json").is_file():
        found = next((f" (found {file.name}, which is never loaded)" for file in sorted(folder.glob("*.gguf"))), "")
        raise ModelError(
            f"--model {model}: the folder holds no config.json{found}; name a transformers checkpoint of safetensors"
        )


def weight_files(folder: Path) -> list[Path]:
    """A checkpoint's safetensors files, by name.

    Raises:
        ModelError: it has none, only pickles or other kinds of weights, lacks one that its index names, or can't be
            read.
    """
    try:
        names = sorted(file.name for file in folder.iterdir())
    except OSError as error:
        raise ModelError(f"--model {folder}: can't be read: {error.strerror}") from error
    found = [name for name in names if name.endswith(".safetensors")]
    if not found:
        others = [name for name in names if name.endswith(_OTHER_WEIGHTS)]
        if others:
            raise ModelError(
                f"--model {folder}: its weights are no safetensors (found {others[0]}), and nothing else is ever "
                "loaded, because a pickle runs code; save the checkpoint as safetensors"
            )
        raise ModelError(f"--model {folder}: the folder holds no weights (*.safetensors)")
    if _INDEX in names and "model.safetensors" not in names:
        missing = sorted(_named_by_index(folder) - set(found))
        if missing:
            shown = ", ".join(missing[:_NAMES_SHOWN]) + (" …" if len(missing) > _NAMES_SHOWN else "")
            raise ModelError(f"--model {folder}: {_INDEX} names what is not there: {shown}; the copy is not whole")
    return [folder / name for name in found]


def weights_digest(folder: Path) -> str:
    """Over names, sizes and evenly spread samples of the bytes of a folder's weight files.

    Raises:
        ModelError: as `weight_files`, or a file is only a pointer of Git LFS.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in weight_files(folder):
        try:
            with file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                digest.update(f"{file.name}\0{size}\0".encode())
                for sample in range(_NUM_SAMPLES):
                    stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
                    data = stream.read(_SAMPLE_BYTES)
                    if data.startswith(_LFS_POINTER):
                        raise ModelError(f"--model {folder}: {file.name} is a pointer of Git LFS; run `git lfs pull`")
                    digest.update(data)
        except OSError as error:
            raise ModelError(f"--model {folder}: {file.name} can't be read: {error.strerror}") from error
    return digest.hexdigest()


def _named_by_index(folder: Path) -> set[str]:
    try:
        named = json.loads((folder / _INDEX).read_bytes())["weight_map"].values()
        return {str(name) for name in named}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"--model {folder}: {_INDEX} can't be used ({type(error).__name__}); copy the checkpoint again"
        ) from error
