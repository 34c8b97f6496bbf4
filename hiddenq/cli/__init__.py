"""The `hiddenq` command: what users type.

Consumes arguments (from `hiddenq/__main__.py`) and `HIDDENQ_…` variables, calls the stages, and turns how they end into
an exit status. It is the one package, with `hiddenq.local`, that sees every stage; each command imports what it needs
when it runs, so `hiddenq status` needs no torch.

Exit status: 0 complete; 1 ended with dead letters or a failed check; 2 wrong usage or configuration (one line, no
traceback); 3 a fault of ours; 130 or 143 interrupted (resumable).
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from typing import Annotated, Any

import typer
from pydantic import ValidationError

import hiddenq
from hiddenq.contracts.errors import HiddenqError, RetryableError, UserError

FAULT_OF_OURS = 3
_CommandLineError: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
"""The root of what Typer raises for a wrong command line: of click, or of the click that Typer brings along."""
_OF_A_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOENT})
"""What is wrong with a disk, whichever file it was; it may pass."""

app = typer.Typer(
    name="hiddenq",
    help="Hidden states of a language model over a whole dataset, through a queue, into an object store.",
    epilog="Start with `hiddenq plan`, then `hiddenq run`. Every option --SOME-NAME is also a variable "
    "HIDDENQ_SOME_NAME, unless its help names another one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(hiddenq.__version__)
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


def exit_status(arguments: list[str]) -> int:
    """Run one command; errors become one line on stderr and a status, never a traceback unless the fault is ours."""
    try:
        result = app(arguments, standalone_mode=False)
    except typer.Exit as leaving:
        return leaving.exit_code
    except _CommandLineError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            _say(f"{error.format_message().rstrip('.')}; --help says what there is")
        return UserError.exit_status
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read our output has gone; what is still buffered must not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-") if first["loc"] else "settings"
        _say(f"--{option}: {first['msg'].removeprefix('Value error, ')}")
        return UserError.exit_status
    except HiddenqError as error:
        _say(str(error))
        return error.exit_status
    except OSError as error:
        if error.filename is None and error.errno not in _OF_A_DISK:
            return _fault(error)
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room, then the same again" if is_full else "is it there, and may this user use it?"
        _say(f"{error.filename or 'a disk'}: {error.strerror}; {remedy}")
        is_started_again = bool(arguments) and arguments[0].endswith("-process") and error.errno in _OF_A_DISK
        return RetryableError.exit_status if is_started_again else UserError.exit_status
    except Exception as error:
        return _fault(error)
    return result if isinstance(result, int) else 0


def _fault(error: Exception) -> int:
    traceback.print_exc()
    _say(f"a fault of ours: {error!r}; the lines above say where")
    return FAULT_OF_OURS


def _say(text: str) -> None:
    print("hiddenq: " + " ".join(text.split()), file=sys.stderr, flush=True)
