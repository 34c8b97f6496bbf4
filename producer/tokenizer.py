"""The target's tokenizer and chat template, loaded without torch, and what is known about them beforehand.

Invariant: a conversation is rendered once, whole, and tokenised as that one string without added special tokens; so
there is one BOS if the template writes one, and the ids are those of the template's own one-step tokenisation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hiddenq.contracts.errors import ModelError, UsageError, words_of
from hiddenq.model_files import place_of
from hiddenq.model_identity import TargetModel
from producer.bytelevel import ByteLengths
from producer.fidelity import check_faithful
from producer.rejects import RowRejected
from producer.settings import ProducerSettings
from producer.template import ChatTemplate

_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tiktoken.model",
    "generation_config.json",
)
"""Files that decide ids and ends of turns, if a model has them; the chat template has a digest of its own."""
_THINKING_ARGUMENTS = ("enable_thinking", "thinking")
_PROBE = "hiddenq probe"


@dataclass(frozen=True, kw_only=True)
class TokenizerSource:
    """Where a tokenizer comes from: all that a process needs to load it."""

    model: str
    revision: str | None
    local_only: bool
    trust_remote_code: bool
    chat_template: str | None
    """Text of a template to use instead of the tokenizer's own."""
    template_arguments: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: ProducerSettings, target: TargetModel) -> TokenizerSource:
        """The source that settings and model name.

        Raises:
            UsageError: the template's file can't be read.
        """
        template = None
        if settings.chat_template is not None:
            try:
                template = settings.chat_template.expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"--chat-template {settings.chat_template}: can't be read: {error}") from error
        return cls(
            model=place_of(settings.model),
            revision=target.identity.revision,
            local_only=target.local_only,
            trust_remote_code=settings.trust_remote_code,
            chat_template=template,
            template_arguments=settings.template_arguments,
        )

    def digest(self) -> str:
        """blake2b-128 over the tokenizer's files in a folder, the chat template left out; over the commit of a hub."""
        digest = hashlib.blake2b(digest_size=16)
        folder = Path(self.model)
        if not folder.is_dir():
            digest.update(f"commit {self.revision}".encode())
            return digest.hexdigest()
        for name in _FILES:
            if (folder / name).is_file():
                data = (folder / name).read_bytes()
                if name == "tokenizer_config.json":
                    fields = json.loads(data)
                    fields.pop("chat_template", None)
                    data = json.dumps(fields, sort_keys=True).encode()
                digest.update(f"{name}\0{len(data)}\0".encode() + data)
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class SlowEncoding:
    """What a tokenizer written in Python knows of a text."""

    ids: list[int]
    special_tokens_mask: list[int]

    def __len__(self) -> int:
        return len(self.ids)


class ChatTokenizer:
    """A tokenizer with its chat template."""

    def __init__(self, source: TokenizerSource) -> None:
        """Load it.

        Raises:
            ModelError: the model has no tokenizer that can be loaded.
        """
        from transformers import AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(
                source.model,
                revision=source.revision,
                local_files_only=source.local_only,
                trust_remote_code=source.trust_remote_code,
            )
        except Exception as error:  # every kind of failure in here has one cause: this tokenizer can't be used
            raise ModelError(f"--model {source.model}: its tokenizer can't be loaded: {words_of(error)}") from error
        self._source = source
        self.backend = getattr(self.tokenizer, "backend_tokenizer", None) if self.tokenizer.is_fast else None
        """The `tokenizers.Tokenizer` beneath; None for a tokenizer written in Python, which knows no offsets."""
        if self.backend is not None:
            self.backend.no_truncation()
            self.backend.no_padding()
            if (file := self._file("tokenizer.json")) is not None:
                check_faithful(source.model, self.backend, file)
        self.byte_lengths = ByteLengths.of(self.backend) if self.backend is not None else None

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            UsageError: there is none, or it can't be compiled.
        """
        text = self._source.chat_template
        if text is None:
            try:
                text = str(self.tokenizer.get_chat_template())
            except ValueError:
                raise UsageError(
                    f"--model {self._source.model}: its tokenizer has no chat template, which conversations need; "
                    "name one with --chat-template FILE"
                ) from None
        try:
            return ChatTemplate(text, {**self.tokenizer.special_tokens_map, **self._source.template_arguments})
        except RowRejected as reject:
            raise UsageError(f"--model {self._source.model}: its chat template can't be compiled: {reject}") from None

    @cached_property
    def special_tokens(self) -> re.Pattern[str]:
        """Matches the text of any special token, the longest first."""
        texts = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        texts.update(self.tokenizer.all_special_tokens)
        return re.compile(
            "|".join(re.escape(text) for text in sorted(texts, key=lambda t: (-len(t), t)) if text) or "(?!)"
        )

    @cached_property
    def end_tokens(self) -> tuple[str, ...]:
        """Special tokens that end an assistant's turn: what the template writes after one, and the model's own ends."""
        ends = set()
        try:
            rendered = self.template.render(_PROBE_TURNS)
        except RowRejected:
            rendered = ""
        _, found, after = rendered.rpartition(_PROBE)
        if found and (match := self.special_tokens.search(after)):
            ends.add(match[0])
        ids = {self.tokenizer.eos_token_id, *self._generation_ends()} - {None}
        ends.update(self.tokenizer.convert_ids_to_tokens(sorted(ids)))
        return tuple(sorted(end for end in ends if end and self.special_tokens.fullmatch(end)))

    def check_template(self) -> None:
        """Refuse a template whose renders can't say where a turn starts.

        Raises:
            UsageError: it has no generation block and ignores `add_generation_prompt`, though it writes a header.
        """
        if self.template.has_generation_block:
            return
        try:
            whole = self.template.render(_PROBE_TURNS)
            prompt = self.template.render(_PROBE_TURNS[:1], add_generation_prompt=True)
            bare = self.template.render(_PROBE_TURNS[:1])
        except RowRejected:  # a template may want more than two turns; each row tells for itself
            return
        if prompt == bare and whole.startswith(prompt) and not whole[len(prompt) :].lstrip().startswith(_PROBE):
            raise UsageError(
                f"--model {self._source.model}: its chat template ignores add_generation_prompt and has no generation "
                "block, so nothing says where the assistant's words start; name another with --chat-template FILE"
            )

    def encode(self, texts: list[str], *, add_special_tokens: bool = False, with_offsets: bool = True) -> list[Any]:
        """Each text's `ids` and `special_tokens_mask`; with a backend, a `tokenizers.Encoding`."""
        if self.backend is not None:
            encode = self.backend.encode_batch if with_offsets else self.backend.encode_batch_fast
            return list(encode(texts, add_special_tokens=add_special_tokens))
        return [
            SlowEncoding(
                ids=(ids := self.tokenizer.encode(text, add_special_tokens=add_special_tokens)),
                special_tokens_mask=self.tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True),
            )
            for text in texts
        ]

    def prompts(self, context: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None) -> Iterator[str]:
        """What the model would have seen after some turns: as asked for, then without the thinking argument.

        Raises:
            RowRejected: `template_error`, if the template raises.
        """
        yield self.template.render(context, tools=tools, add_generation_prompt=True)
        if any(name in self._source.template_arguments for name in _THINKING_ARGUMENTS):
            yield self.template.render(context, tools=tools, add_generation_prompt=True, without=_THINKING_ARGUMENTS)

    def _generation_ends(self) -> list[int]:
        """Ids that end generation by the model's `generation_config.json`, if it has one."""
        path = self._file("generation_config.json")
        if path is None:
            return []
        ends = json.loads(path.read_bytes()).get("eos_token_id")
        return [ends] if isinstance(ends, int) else [end for end in ends or () if isinstance(end, int)]

    def _file(self, name: str) -> Path | None:
        """A file of the model's, None if it has none of that name."""
        from transformers.utils import cached_file

        found = cached_file(
            self._source.model,
            name,
            revision=self._source.revision,
            local_files_only=self._source.local_only,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return Path(found) if found is not None else None


_PROBE_TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
