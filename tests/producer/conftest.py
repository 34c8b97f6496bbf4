"""A tiny model folder, and a producer that runs over rows given in Python."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from hiddenq.contracts.errors import ModelError
from hiddenq.contracts.manifest import BatchPlan, Rejected
from hiddenq.storage import ObjectStore, open_store
from hiddenq.storage.runfiles import TokenRow, load_batches, load_rejected, read_token_rows
from producer import Prepared, ProducerSettings, prepare
from producer.blocks import Block
from producer.encoder import Encoder, EncoderSettings
from producer.samples import EncodedBlock
from producer.tokenizer import TokenizerSource
from tests.support.models import tiny_config, tiny_tokenizer, write_config
from tests.support.small_disk import small_disk  # noqa: F401  fixture
from tests.support.tokenizers import real_tokenizer


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run over some rows came to."""

    prepared: Prepared
    store: ObjectStore

    @property
    def batches(self) -> list[BatchPlan]:
        """The batches, as a worker finds them."""
        return load_batches(self.store)

    @property
    def samples(self) -> dict[int, TokenRow]:
        """Every sample of every batch; fails if one is in two."""
        found: dict[int, TokenRow] = {}
        for batch in self.batches:
            for row in read_token_rows(self.store, batch.token_part, batch.first_row, batch.num_samples):
                assert row.sample_id not in found
                found[row.sample_id] = row
        return found

    @property
    def rejected(self) -> list[Rejected]:
        """The rows left out."""
        return load_rejected(self.store)

    @property
    def reasons(self) -> dict[int, str]:
        """Why each row was left out."""
        return {reject.row: reject.reason for reject in self.rejected}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny llama's config, the tiny tokenizer, and something in place of weights."""
    return make_model(tmp_path_factory.mktemp("model"))


def make_model(folder: Path, *, template: str | None = None, **fields: Any) -> Path:
    """Such a folder, with another chat template or other fields in its config."""
    write_config(folder, tiny_config("llama"), **{"max_position_embeddings": 4096} | fields)
    (folder / "model.safetensors").write_bytes(b"weights")
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """A file of JSON lines; bytes are written as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


Produce = Callable[..., Outcome]


@pytest.fixture
def produce(model: Path, tmp_path: Path) -> Produce:
    """Run the producer over rows into a local folder: `produce(rows, **settings)`."""

    def run(rows: Iterable[Any], **settings: Any) -> Outcome:
        data = write_lines(tmp_path / "rows.jsonl", rows)
        settings = {"model": str(model), "data": (str(data),), "target_layers": "1,2", "max_rejected": 1.0, **settings}
        store = open_store(tmp_path / "out")
        return Outcome(prepared=prepare(ProducerSettings(**settings), store), store=store)

    return run


def make_encoder(tokenizer: Path | str, **fields: Any) -> Encoder:
    """An encoder for rows of `messages`, or as the fields say."""
    template = fields.pop("chat_template", None)
    arguments = fields.pop("template_arguments", {})
    source = TokenizerSource(
        model=str(tokenizer), revision=None, local_only=True, trust_remote_code=False, chat_template=template,
        template_arguments=arguments,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "row_schema": "messages", "tokenizer": source, "vocab_size": 1 << 20, "max_length": 4096,
        "length_policy": "truncate", "special_tokens": "count", "surrogates": "replace",
    }  # fmt: skip
    return Encoder(EncoderSettings(**settings | fields))


@functools.cache
def real_encoder(name: str, schema: str = "messages", options: str = "{}") -> Encoder:
    """An encoder with a real tokenizer, loaded once; `options` are JSON."""
    try:
        return make_encoder(real_tokenizer(name), row_schema=schema, **json.loads(options))
    except ModelError as error:
        if transformers.__version__ < "5.24" and "reads its tokenizer.json otherwise" in str(error):
            pytest.skip(str(error))  # the refusal is right: that release loses text
        raise


def encode_rows(encoder: Encoder, rows: Iterable[Any]) -> EncodedBlock:
    """Rows through an encoder, as one block."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    return encoder.encode(Block(num_rows=len(lines), num_bytes_read=0, places=range(1, len(lines) + 1), lines=lines))


def split_samples(block: EncodedBlock) -> dict[int, tuple[list[int], list[int]]]:
    """Ids and mask of each sample, by row."""
    cuts = np.cumsum(block.lengths)[:-1]
    ids, masks = np.split(block.input_ids, cuts), np.split(block.loss_mask, cuts)
    return {row: (ids[place].tolist(), masks[place].tolist()) for place, row in enumerate(block.sample_ids.tolist())}


def chat(*contents: str) -> dict[str, Any]:
    """A row of turns by user and assistant."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(contents)]}
