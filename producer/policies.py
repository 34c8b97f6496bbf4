"""What is done about odd text: unpaired surrogates, and special tokens that somebody typed.

Invariant: a text comes out as it was, mended in the stated way and counted, or its row is refused by name.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Literal

from producer.blocks import Suspect
from producer.rejects import RowRejected

SpecialTokens = Literal["count", "escape", "reject"]
Surrogates = Literal["replace", "reject"]

_SURROGATE = re.compile("[\ud800-\udfff]")
_ZERO_WIDTH_SPACE = "\u200b"


def without_surrogates(suspect: Suspect, policy: Surrogates, repairs: Counter[str]) -> Any:
    """A row's value with U+FFFD in the place of unpaired surrogates.

    Raises:
        RowRejected: it holds some, and the policy is to refuse them.
    """
    try:
        replaced = _replace_surrogates(suspect.value)
    except RecursionError:
        raise RowRejected("not_json", "nested too deeply") from None
    if replaced is not suspect.value:
        if policy == "reject":
            raise RowRejected("bad_text", "an unpaired surrogate")
        repairs["surrogates_replaced"] += 1
    return replaced


def has_surrogates(value: Any) -> bool:
    """Whether a text in a decoded value holds an unpaired surrogate."""
    return _replace_surrogates(value) is not value


def with_special_tokens(text: str, pattern: re.Pattern[str], policy: SpecialTokens, repairs: Counter[str]) -> str:
    """A text after what the policy does about the special tokens that it spells, which `pattern` matches.

    Raises:
        RowRejected: it spells some, and the policy is to refuse them.
    """
    match = pattern.search(text)
    if match is None:
        return text
    if policy == "reject":
        raise RowRejected("special_token", f"the text spells {match[0]}")
    if policy == "escape":
        repairs["special_tokens_escaped"] += 1
        return pattern.sub(lambda found: f"{found[0][0]}{_ZERO_WIDTH_SPACE}{found[0][1:]}", text)
    repairs["special_tokens_found"] += 1
    return text


def _replace_surrogates(value: Any) -> Any:
    """A value without unpaired surrogates; the value itself if it has none."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value) if _SURROGATE.search(value) else value
    if isinstance(value, list):
        items = [_replace_surrogates(item) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if isinstance(value, dict):
        fields = {_replace_surrogates(name): _replace_surrogates(field) for name, field in value.items()}
        kept = all(a is b and x is y for (a, x), (b, y) in zip(fields.items(), value.items(), strict=False))
        return value if kept and len(fields) == len(value) else fields
    return value
