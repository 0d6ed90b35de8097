"""What is said of an exception, and with which exit code: whose fault was it?

The user's frames decide. If the innermost frame that is neither a library's nor xform's own is the last one
to run, the user's program raised; if xform's is, xform did. A user sees the message and the user's own lines,
never a traceback of ours; that one is written to a file, for whoever mends it.
"""

from __future__ import annotations

import os
import pathlib
import sysconfig
import tempfile
import traceback
from types import TracebackType

from xform.errors import Decline, PlanError, RewriteError

OK, DIFFERS, BAD_INPUT, OUR_FAULT, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes of the command line."""

LIBRARIES = frozenset({"jax", "jaxlib", "flax", "numpy", "absl", "importlib", "_frozen_importlib", "runpy"})
EXAMPLES = "xform.models"  # ordinary programs, though they come with xform
SHOWN = 4  # of the user's frames
_STANDARD = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib"))
_INSTALLED = tuple(sysconfig.get_paths()[key] for key in ("purelib", "platlib"))


def text_of(path: str | os.PathLike[str]) -> str:
    """The text of a user's file. Raises PlanError, which names it, where it cannot be read."""
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{os.fspath(path)}: is not a text file: {error}") from error


def told(error: BaseException) -> tuple[int, str]:
    """The exit code and the text for an exception that a command ended with."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, (PlanError, Decline)):
        return BAD_INPUT, str(error)
    mine, lines = _frames(error.__traceback__)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return BAD_INPUT, f"this machine has not the memory for it: {summary(error)}"
    if lines and not mine and not isinstance(error, RewriteError):
        return BAD_INPUT, "\n".join([f"your program failed: {summary(error)}", *lines])
    with tempfile.NamedTemporaryFile("w", prefix="xform-fault-", suffix=".txt", delete=False) as file:
        file.write("".join(traceback.format_exception(error)))
    return OUR_FAULT, (
        f"a fault of xform, not of your program or plan: {summary(error)}\n  the traceback is in {file.name}"
    )


def users_lines(error: BaseException) -> list[str]:
    """The user's own frames of an exception, innermost last, as lines to be printed below its message."""
    return _frames(error.__traceback__)[1]


def summary(error: BaseException) -> str:
    """Type and message, of a long message its first paragraph."""
    paragraph = str(error).strip().split("\n\n")[0].splitlines()
    text = "\n  ".join(line.rstrip() for line in paragraph[:6] if not line.startswith(("See http", "-----")))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _frames(tb: TracebackType | None) -> tuple[bool, list[str]]:
    """Whether the innermost frame, libraries' left out, is xform's; and the user's frames as lines."""
    mine, lines = False, []
    for frame, number in traceback.walk_tb(tb):
        module = frame.f_globals.get("__name__", "")
        path = frame.f_code.co_filename
        if _is_ours(module):
            mine = True
        elif not _is_library(module, path):
            mine = False
            source = traceback.FrameSummary(path, number, frame.f_code.co_name).line or ""
            lines.append(f"  {_short(path)}:{number} in {frame.f_code.co_name}: {source}".rstrip(": "))
    return mine, lines[-SHOWN:]


def _is_ours(module: str) -> bool:
    inside = module == "xform" or module.startswith("xform.")
    return inside and module != EXAMPLES and not module.startswith(f"{EXAMPLES}.")


def _is_library(module: str, path: str) -> bool:
    standard = path.startswith(_STANDARD) and not path.startswith(_INSTALLED)
    return standard or path.startswith("<frozen") or module.partition(".")[0] in LIBRARIES


def _short(path: str) -> str:
    """A path below the current directory as seen from there."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here)
