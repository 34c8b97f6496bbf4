"""Whether a tokenizer as loaded is still the one in its file.

Invariant: text that the file's tokenizer keeps is kept. transformers rebuilds some tokenizers by the name of their
class instead of reading `tokenizer.json`; some releases, 5.17 among them, thereby swallow the spaces of byte-level
tokenizers that go by the name of Llama's (DeepSeek V3), without an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hiddenq.contracts.errors import ModelError

_PROBE = "Is 91 prime?  No:\n\t7 times 13, na\u00efve \u65e5\u672c\u8a9e."


def check_faithful(model: str, backend: Any, file: Path) -> None:
    """Refuse a `tokenizers.Tokenizer` that loses text which the one in `file` keeps.

    Raises:
        ModelError: it does.
    """
    import transformers
    from tokenizers import Tokenizer

    original = Tokenizer.from_file(str(file))
    original.no_truncation()
    original.no_padding()
    ids, original_ids = (each.encode(_PROBE, add_special_tokens=False).ids for each in (backend, original))
    kept, found = (
        original.decode(original_ids, skip_special_tokens=False),
        backend.decode(ids, skip_special_tokens=False),
    )
    if ids != original_ids and kept == _PROBE != found:
        raise ModelError(
            f"--model {model}: transformers {transformers.__version__} reads its tokenizer.json otherwise than it is "
            f"written, and loses text ({found[:20]!r} for {_PROBE[:20]!r}); use a newer transformers"
        )
