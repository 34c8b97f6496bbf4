"""A tokenizer that was loaded wrongly is refused, and no other one is."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

from hiddenq.contracts.errors import ModelError
from producer.fidelity import check_faithful
from tests.support.models import tiny_tokenizer
from tests.support.tokenizers import NAMES, real_tokenizer

BACKEND = tiny_tokenizer().backend_tokenizer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    BACKEND.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_that_loses_what_its_file_keeps_is_refused(file: Path) -> None:
    changed = copy.deepcopy(BACKEND)
    changed.pre_tokenizer, changed.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    with pytest.raises(ModelError, match=r"--model M: transformers 5\.\d+\.\d+ reads its tokenizer\.json otherwise"):
        check_faithful("M", changed, file)


def test_one_that_differs_without_loss_or_whose_file_loses_as_much_is_not(file: Path, tmp_path: Path) -> None:
    check_faithful("M", BACKEND, file)
    other = copy.deepcopy(BACKEND)
    other.add_special_tokens(["prime"])
    check_faithful("M", other, file)
    lower = copy.deepcopy(BACKEND)
    lower.normalizer = normalizers.Lowercase()
    lower.save(str(tmp_path / "lower.json"))
    check_faithful("M", Tokenizer.from_file(str(tmp_path / "lower.json")), tmp_path / "lower.json")


@pytest.mark.parametrize("name", NAMES)
def test_real_tokenizers_keep_every_text(name: str) -> None:
    original = Tokenizer.from_file(str(real_tokenizer(name) / "tokenizer.json"))
    text = "Is 91 prime?  No:\n\t7 times 13, naïve 日本語."
    assert original.decode(original.encode(text, add_special_tokens=False).ids) == text
