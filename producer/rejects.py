"""What may become of a row besides a sample: refused by name, or mended and counted.

Invariant: both sets of names are fixed; whatever is wrong with a row, it is one of these, and nothing happens to a row
that neither says.
"""

from __future__ import annotations

from hiddenq.contracts.manifest import RejectReason

REPAIRS = {
    "text_parts_joined": "content given as text parts was joined in order",
    "system_column": "a system text in a column of its own became the first turn",
    "columns_of_turns": "turns stored column by column were put together again",
    "tool_calls_adapted": "tool calls were put into the form that the chat template takes",
    "reasoning_left_out": "turns whose reasoning the chat template leaves out",
    "surrogates_replaced": "unpaired surrogates became U+FFFD",
    "special_tokens_found": "text spells special tokens of the tokenizer; they count as such",
    "special_tokens_escaped": "special tokens spelled in text were broken by a zero-width space",
    "truncated": "samples were cut at the length limit",
    "straddling_tokens": "tokens that straddle the start of what is supervised are not",
    "thinking_argument_left_out": "turns whose start was found without the thinking argument",
}
"""What may be mended or noticed in a row that is kept, and what each means."""
_MAX_DETAIL = 200


class RowRejected(Exception):
    """This row can't be used."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: RejectReason = reason
        self.detail = detail if len(detail) <= _MAX_DETAIL else detail[: _MAX_DETAIL - 1] + "…"
