"""`hiddenq` and `python -m hiddenq`: the command's first moment.

Invariant: Ctrl-C ends the command at once and without a traceback while it is only being imported, when nothing is open
yet that would have to be closed. So this module imports nothing of weight before it has seen to that.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """Entry point: run the command and exit with its status."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a job in the background ignores it
    if is_heard:
        signal.signal(signal.SIGINT, _leave)
    from hiddenq.supervisor import die_with_parent

    die_with_parent()
    from hiddenq.cli import exit_status, run, stages, inspect, training, fleet  # noqa: F401, I001  each registers its commands, in this order

    from hiddenq.telemetry import configure_logging

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    configure_logging(default_level="WARNING", in_words=True)  # a service says otherwise
    sys.exit(exit_status(sys.argv[1:]))


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
