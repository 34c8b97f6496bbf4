"""The loss mask, in characters first: which stretches of a rendered conversation the assistant said.

Invariant: a span's start is proved, never guessed. The prompt that the model would have seen before the turn, rendered
by the same template, must be a prefix of the whole render as a string; so no span can slide. A turn starts where that
prompt ends and ends with the first end-of-turn token after it. Where either can't be had, the row is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from producer.rejects import RowRejected

MASK_RULE = 1
"""Version of the rule; part of a run's tokenizer policies."""

Span = tuple[int, int]
"""Characters `begin` to `end` (exclusive) of a render."""


class Alignment(Protocol):
    """Which token covers which characters: a `tokenizers.Encoding`."""

    def __len__(self) -> int: ...

    def char_to_token(self, char_pos: int) -> int | None:
        """The first token that covers a character."""
        ...

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None:
        """The characters that a token covers; may be empty, where one character has many tokens."""
        ...


def turn_start(rendered: str, prompts: Iterable[str], *, turn: int) -> tuple[int, int]:
    """Where one assistant turn starts, and the number of the prompt that proved it.

    `prompts` are renders of what precedes the turn, with the generation prompt, the surest first; the first one that
    is a prefix of `rendered` counts.

    Raises:
        RowRejected: `mask_unsure`, if no prompt is a prefix.
    """
    for number, prompt in enumerate(prompts):
        if rendered.startswith(prompt):
            return len(prompt), number
    raise RowRejected("mask_unsure", f"turn {turn}: the prompt before it is not a prefix of the whole render")


def turn_end(rendered: str, end_tokens: Sequence[str], begin: int, until: int, *, turn: int, is_last: bool) -> int:
    """Where the assistant turn that starts at `begin` ends, looked for before the character `until` alone.

    The newline that many templates add after an end-of-turn token lies outside.

    Raises:
        RowRejected: `mask_unsure`, if the end can't be found.
    """
    ends = [found + len(token) for token in end_tokens if (found := rendered.find(token, begin, until)) >= 0]
    if not ends and not is_last and until >= len(rendered):
        raise RowRejected("mask_unsure", f"turn {turn}: no end-of-turn token after it")
    return min(ends, default=until)


def num_chars_covered(alignment: Alignment, num_tokens: int, num_chars: int) -> int:
    """The character at which the first so many tokens end; `num_chars`, the text's length, if none of them says."""
    spans = (alignment.token_to_chars(token) for token in range(num_tokens - 1, -1, -1))
    return next((span[1] for span in spans if span is not None), num_chars)


def mask_of_spans(alignment: Alignment, spans: Iterable[Span], num_chars: int) -> tuple[npt.NDArray[np.uint8], int]:
    """Mask uint8 [S] of the tokens that start inside a span, and how many tokens straddle a span's start.

    One that begins before a span and ends inside is not supervised: it is decided by what the assistant did not say.
    """
    mask = np.zeros(len(alignment), np.uint8)
    num_straddling = 0
    for begin, end in spans:
        first = _first_token_from(alignment, begin, num_chars)
        mask[first : _first_token_from(alignment, end, num_chars)] = 1
        chars = alignment.token_to_chars(first - 1) if first else None
        num_straddling += chars is not None and chars[1] > begin
    return mask, num_straddling


def mask_by_prefixes(
    ids: Sequence[int], tokenize: Callable[[str], Sequence[int]], text: str, spans: Iterable[Span]
) -> npt.NDArray[np.uint8]:
    """Mask uint8 [S] without offsets: the text before each edge of a span must tokenise to a prefix of the ids.

    Raises:
        RowRejected: `mask_unsure`, if it does not.
    """
    mask = np.zeros(len(ids), np.uint8)
    for span in spans:
        edges = []
        for edge in span:
            before = list(tokenize(text[:edge])) if edge < len(text) else list(ids)
            if before != list(ids[: len(before)]):
                raise RowRejected("mask_unsure", f"no token ends at character {edge}, where a turn does")
            edges.append(len(before))
        mask[edges[0] : edges[1]] = 1
    return mask


def _first_token_from(alignment: Alignment, char: int, num_chars: int) -> int:
    """The first token that starts at `char` or later; the number of tokens if none does."""
    token = None
    for covered in range(char, num_chars):  # a character that no token covers (dropped space) asks the next one
        token = alignment.char_to_token(covered)
        if token is not None:
            break
    if token is None:
        return len(alignment)
    while token > 0 and _start(alignment, token - 1) >= char:
        token -= 1
    while token < len(alignment) and _start(alignment, token) < char:
        token += 1
    return token


def _start(alignment: Alignment, token: int) -> int:
    chars = alignment.token_to_chars(token)
    return chars[0] if chars is not None else -1
