"""A chat template, compiled once: rendered directly, and faster than through its tokenizer.

Invariant: what it renders is what `apply_chat_template` renders. The template is compiled by transformers itself, with
its filters and inside its sandbox; only the sandbox's look-up of attributes gets a short cut for the two kinds of
look-ups that it always allows, which is half of a template's time.
"""

from __future__ import annotations

import re
from typing import Any

from producer.rejects import RowRejected

_GENERATION_BLOCK = re.compile(r"\{\%-?\s*generation\s*-?\%\}")
_DICT_ATTRIBUTES = frozenset(dir(dict))
_STR_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class ChatTemplate:
    """A compiled chat template with the variables that every render sees."""

    def __init__(self, text: str, variables: dict[str, Any]) -> None:
        """`variables` are the tokenizer's special tokens by name, and the user's template arguments.

        Raises:
            RowRejected: `template_error`, if the text is no template.
        """
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self.text = text
        self.has_generation_block = _GENERATION_BLOCK.search(text) is not None
        self.writes_date = "strftime_now" in text
        """Whether a render may depend on the day it is made."""
        self._variables = variables
        try:
            self._compiled = _compile_jinja_template(text)
        except Exception as error:
            raise RowRejected("template_error", f"{type(error).__name__}: {error}") from error
        self._compiled.globals = dict(self._compiled.globals)  # a chain of mappings is slow to copy, once a render
        _shorten_lookups(self._compiled.environment)

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        add_generation_prompt: bool = False,
        without: tuple[str, ...] = (),
    ) -> str:
        """A conversation as one string; variables named in `without` are left undefined.

        Raises:
            RowRejected: `template_error`, if the template raises.
        """
        context = self._context(messages, tools, add_generation_prompt)
        for name in without:
            context.pop(name, None)
        try:
            return str(self._compiled.render(context))
        except Exception as error:  # a template may raise anything, and runs code that came with the model
            raise RowRejected("template_error", f"{type(error).__name__}: {error}") from error

    def render_marked(self, messages: Messages, *, tools: Tools = None) -> tuple[str, list[tuple[int, int]]]:
        """A conversation as one string, and the characters inside the template's generation blocks.

        Raises:
            RowRejected: `template_error`, if the template raises.
        """
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        try:
            with self._compiled.environment.activate_tracker(pieces, spans):
                for piece in self._compiled.generate(self._context(messages, tools, False)):
                    pieces.append(piece)  # the tracker reads the pieces as they come
        except Exception as error:
            raise RowRejected("template_error", f"{type(error).__name__}: {error}") from error
        return "".join(pieces), spans

    def _context(self, messages: Messages, tools: Tools, add_generation_prompt: bool) -> dict[str, Any]:
        return {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
        }


def _shorten_lookups(environment: Any) -> None:
    """Answer at once what the sandbox allows after several checks, for the values that templates look into most.

    Keys of a dict that are no attributes of it are what the sandbox falls back to; public names of a loop or a
    namespace, and a str's methods (`format` aside), it always allows. Everything else goes its way.
    """
    if "getattr" in vars(environment):
        return
    from jinja2.runtime import LoopContext
    from jinja2.utils import Namespace

    sandboxed = environment.getattr

    def look_up(value: Any, name: str) -> Any:
        kind = type(value)
        if kind is dict:
            if name not in _DICT_ATTRIBUTES:
                return value[name] if name in value else environment.undefined(obj=value, name=name)
        elif kind is str:
            if name in _STR_METHODS:
                return getattr(value, name)
        elif issubclass(kind, (LoopContext, Namespace)) and not name.startswith("_"):
            try:
                return getattr(value, name)
            except AttributeError:
                pass
        return sandboxed(value, name)

    environment.getattr = look_up
