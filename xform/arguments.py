"""Command-line arguments: errors that take one line and name what is nearest, and the types of values.

`Parser` is absl's, so absl's own flags (`--verbosity`, `--helpfull`) work, and its help stays out of ours.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterator
from typing import NoReturn

from absl.flags import argparse_flags

from xform.faults import BAD_INPUT


class Parser(argparse_flags.ArgumentParser):  # type: ignore[misc]
    """An argument parser whose errors are one line with the nearest option or command."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"unrecognized arguments: (-\S+)|invalid choice: '(.*?)'", message)
        if wrong:
            word = (wrong[1] or wrong[2]).partition("=")[0]
            there = dict.fromkeys(option for option in _words(self) if len(option) > 2)
            near = difflib.get_close_matches(word, there, 1)
            message = re.sub(r"argument COMMAND: invalid choice: ('.*?') .*", r"no command \1", message)
            message += f"; did you mean {near[0]}?" if near else ""
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(BAD_INPUT)


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The options and commands of a parser and of its commands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield name
                yield from _words(sub)


class Layout(argparse.RawDescriptionHelpFormatter):
    """Help in lines up to 100 wide, the description as it is written."""

    def __init__(self, prog: str) -> None:
        width = min(os.get_terminal_size().columns if sys.stdout.isatty() else 100, 110)
        super().__init__(prog, max_help_position=28, width=width)


def whole_number(text: str) -> int:
    """1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def not_negative(text: str) -> float:
    """A number of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def writable(path: str) -> str:
    """The path of a file that can be written, told before the long work whose result it is to hold."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{path} is a directory")
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{path}: there is no directory {folder}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path
