"""From what a user names as data to files on this machine, in a fixed order.

Invariant: the list of files and their order follow from the names given and what lies there, never from the order in
which a file system lists it; and every input becomes a local file of bytes, so reading and digesting know one kind.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from hiddenq.contracts.errors import DatasetError, words_of
from hiddenq.contracts.run import DataFile
from hiddenq.contracts.wording import shown
from hiddenq.model_identity import hub_answers
from hiddenq.storage import holds_credentials
from producer.spill import needing_room

_SUFFIXES = (".jsonl", ".json", ".ndjson", ".gz", ".zst", ".parquet", ".arrow")
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "state.json")
"""What lies beside the data of a hub dataset."""
_READ_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One file of rows."""

    name: str
    """As a person knows it: a path or an `s3://` URI."""
    path: Path

    @classmethod
    def at(cls, path: Path) -> InputFile:
        """A file that is known by its path."""
        return cls(name=shown(path), path=path)


def check_named(entries: Sequence[str]) -> None:
    """Find out in no time whether what is named on this machine is there.

    Raises:
        DatasetError: it is not.
    """
    for entry in entries:
        if holds_credentials(entry):  # not shown, and never in run.json
            raise DatasetError("--data: a URI holds credentials; put them into AWS_ACCESS_KEY_ID and the like")
        if "://" not in entry and (Path(entry).expanduser().exists() or not _may_be_hub(entry)):
            for file in _resolve_local(entry):
                _check_readable(file)


def resolve_data(entries: Sequence[str], scratch: Callable[[], Path]) -> list[InputFile]:
    """The files that the entries name, in order; `scratch` gives the folder for what has to be fetched first.

    Raises:
        DatasetError: an entry that names nothing, or something that can't be read.
    """
    files: list[InputFile] = []
    for entry in entries:
        if entry.startswith("s3://"):
            files += _fetch_s3(entry, scratch() / f"s3-{len(files)}")
        elif "://" in entry:
            raise DatasetError(f"--data {entry}: expected a path, s3://bucket/key or a hub dataset's name")
        else:
            files += _resolve_local(entry)
    for file in files:
        _check_readable(file)
    return files


def digest_files(files: Sequence[InputFile], progress: Callable[[int], None]) -> tuple[DataFile, ...]:
    """Each file with its size and the digest of its bytes; `progress` hears of bytes read so far."""
    found = []
    num_read = 0
    buffer = memoryview(bytearray(_READ_BYTES))
    for file in files:
        digest = hashlib.blake2b(digest_size=16)
        num_bytes = 0
        with file.path.open("rb", buffering=0) as stream:
            while size := stream.readinto(buffer):
                digest.update(buffer[:size])
                num_bytes += size
                progress(num_read + num_bytes)
        num_read += num_bytes
        found.append(DataFile(name=file.name, num_bytes=num_bytes, digest=digest.hexdigest()))
    return tuple(found)


def _resolve_local(entry: str) -> list[InputFile]:
    path = Path(entry).expanduser()
    if path.is_dir():
        return [InputFile.at(file) for file in _folder_files(path)]
    if path.exists():
        return [InputFile(name=shown(entry), path=path)]
    if glob.has_magic(entry):
        matches = sorted(glob.glob(str(path), recursive=True))
        found = [InputFile.at(Path(match)) for match in matches if Path(match).is_file()]
        if not found:
            raise DatasetError(f"--data {entry}: no file matches")
        return found
    if _may_be_hub(entry):
        return _hub_files(entry)
    raise DatasetError(f"--data {entry}: no such file")


def _folder_files(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        try:
            splits = [str(name) for name in orjson.loads((folder / "dataset_dict.json").read_bytes())["splits"]]
            example = f"{folder}/{splits[0]}"
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DatasetError(f"--data {folder}: its dataset_dict.json names no splits: {error!r}") from error
        raise DatasetError(f"--data {folder}: it holds the splits {', '.join(splits)}; name one: {example}")
    if (folder / "state.json").is_file():
        return _saved_dataset_files(folder)
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix in _SUFFIXES
        and file.is_file()
        and file.name not in _NOT_DATA
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not files:
        raise DatasetError(f"--data {folder}: no {', '.join(_SUFFIXES)} file in this folder")
    return files


def _saved_dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `datasets` wrote with `save_to_disk`, in the order of their rows."""
    try:
        state: Any = orjson.loads((folder / "state.json").read_bytes())
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"--data {folder}: its state.json is not that of a saved dataset: {error!r}") from error
    if state.get("_indices_data_files"):
        raise DatasetError(f"--data {folder}: saved with an index of rows; flatten it first (flatten_indices)")
    return [folder / Path(name).name for name in names]


def _check_readable(file: InputFile) -> None:
    try:
        with file.path.open("rb") as stream:
            stream.read(1)
    except OSError as error:
        raise DatasetError(f"--data {file.name}: can't be read: {error.strerror or error}") from error


def _may_be_hub(entry: str) -> bool:
    name = entry.split(":")[0]
    return name.count("/") <= 1 and not entry.startswith((".", "/", "~")) and Path(name).suffix not in _SUFFIXES


def _hub_files(entry: str) -> list[InputFile]:
    """The Arrow files into which `datasets` has put `owner/name[:config][:split]` (split `train` unless named)."""
    name, *rest = entry.split(":")
    if len(rest) > 2:
        raise DatasetError(f"--data {entry}: expected owner/name, owner/name:split or owner/name:config:split")
    config, split = (rest[0], rest[1]) if len(rest) == 2 else (None, rest[0] if rest else "train")
    is_reachable = hub_answers()
    import datasets
    import huggingface_hub.constants

    if not is_reachable:  # then its cache answers at once, where it would try for half a minute
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        dataset = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # every kind of failure in here has one cause: this dataset can't be used
        if not is_reachable:
            raise DatasetError(
                f"--data {entry}: no such file, and not in the hub's cache on this machine; the hub of datasets can't "
                "be reached from here"
            ) from error
        raise DatasetError(f"--data {entry}: not a file here, and the hub says: {_root_cause(error)}") from error
    files = [Path(file["filename"]) for file in dataset.cache_files]
    if not files:
        raise DatasetError(f"--data {entry}: it holds no rows")
    return [InputFile(name=f"{entry}#{number}", path=file) for number, file in enumerate(files)]


def _root_cause(error: BaseException) -> str:
    """What the error says that an error came from: `datasets` wraps it in some that say less."""
    while cause := error.__cause__:
        error = cause
    return words_of(error)


def _fetch_s3(uri: str, folder: Path) -> list[InputFile]:
    """Download an object, the objects that match a pattern, or all data files under a prefix, in the order of keys."""
    import boto3
    import boto3.exceptions
    import botocore.exceptions

    from hiddenq.storage.s3_errors import translate

    bucket, _, wanted = uri.removeprefix("s3://").partition("/")
    if not bucket or not wanted:
        raise DatasetError(f"--data {uri}: expected s3://bucket/key, a pattern, or a prefix that ends in /")
    try:
        client = boto3.client("s3")
        keys = _s3_keys(client, bucket, wanted)
        if not keys:
            raise DatasetError(f"--data {uri}: no object there")
        folder.mkdir(parents=True)
        found = []
        for number, key in enumerate(keys):
            path = folder / f"{number:05d}"
            with needing_room(folder):
                client.download_file(bucket, key, str(path))
            found.append(InputFile(name=f"s3://{bucket}/{key}", path=path))
    except boto3.exceptions.RetriesExceededError as error:
        last = getattr(error, "last_exception", error)  # which its stubs don't know
        raise DatasetError(f"--data {uri}: broke off again and again: {words_of(last)}") from error
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, ValueError) as error:
        raise DatasetError(str(translate(error, f"--data {uri}"))) from error
    return found


def _s3_keys(client: Any, bucket: str, wanted: str) -> list[str]:
    prefix = wanted[: next((place for place, char in enumerate(wanted) if char in "*?["), len(wanted))]
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    keys = sorted(item["Key"] for page in pages for item in page.get("Contents", ()))
    if wanted.endswith("/"):
        return [key for key in keys if Path(key).suffix in _SUFFIXES]
    return (
        [key for key in keys if fnmatch.fnmatchcase(key, wanted)]
        if prefix != wanted
        else [key for key in keys if key == wanted]
    )
