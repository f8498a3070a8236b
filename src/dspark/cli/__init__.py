"""The `dspark` command: one module a verb, imported light so that help is instant.

Torch and the models are imported by the verb that runs, never here. Exit codes: 0, 1 (a check the verb made
failed, e.g. outputs differ), 2 (bad input, or a file that fails: one line on stderr), 130 (Ctrl-C).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from dspark import __version__
from dspark.cli import (
    audit,
    bench,
    calibrate,
    chat,
    data,
    evaluate,
    generate,
    info,
    profile,
    serve,
    simulate,
    train,
)

__all__ = ["main"]

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class _UsageError(Exception):
    """argparse found fault with the arguments."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message} (see: {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dspark", description="Speculative decoding with DSpark, end to end.")
    parser.add_argument("--version", action="version", version=f"dspark {__version__}")
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
    for verb in (
        generate,
        chat,
        serve,
        info,
        bench,
        audit,
        data,
        train,
        calibrate,
        evaluate,
        simulate,
        profile,
    ):
        verb.add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: the process's own) and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what a narrow terminal cannot show
    try:
        args = _parser().parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()  # a closed pipe shows here, not at interpreter exit
        return code
    except _UsageError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away. Python flushes stdout once more at exit, which must not complain either.
        with contextlib.suppress(OSError):  # stdout may be no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, as other tools report it
    except OSError as error:  # a full disk, a file that vanished: nothing of the program's
        if error.filename is None and error.errno not in _DISK:
            raise
        return _fail(error)
    except ValueError as error:
        from dspark.core import DSparkError  # only here: it imports torch

        if not isinstance(error, DSparkError):
            raise
        return _fail(error)


def _fail(error: Exception) -> int:
    message = " ".join(str(error).split())
    print(f"error: {message}", file=sys.stderr)
    return 2
