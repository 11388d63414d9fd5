"""Run a program as ``python`` would: with its ``__main__``, arguments, path, tracebacks and exit status."""

import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

_STANDARD_INPUT = "<stdin>"


@dataclass(frozen=True)
class Program:
    """A program on the command line of ``python``.

    Attributes:
        name: the path of a script, of a folder or an archive with a ``__main__``, or ``-`` for the standard input; a
            module's name if `is_module`.
        arguments: its arguments.
        is_module: whether to run it like ``python -m``.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def path(self) -> str:
        """The absolute path of a script, as ``python`` makes it."""
        return os.path.join(os.getcwd(), self.name)

    def prepare(self) -> Callable[[], None]:
        """Return a function that runs the program, to call without any handler of exceptions around it.

        Raises:
            OSError: the script cannot be read.
        """
        if self.is_module:
            return lambda: self._run("-m", os.getcwd(), lambda: _run_module(self.name, alter_argv=True))
        if self.name == "-":
            return lambda: self._run("-", "", lambda: _run_code(sys.stdin.buffer.read(), _STANDARD_INPUT))
        path = self.path
        if not isinstance(pkgutil.get_importer(path), (importlib.machinery.FileFinder, type(None))) or (
            os.path.isdir(path)
        ):
            return lambda: self._run(self.name, path, lambda: _run_module("__main__", alter_argv=False), found_in=True)
        with io.open_code(path) as file:
            content = file.read()
        folder = os.path.dirname(os.path.realpath(path))
        return lambda: self._run(self.name, folder, lambda: _run_code(content, path))

    def _run(self, argv0: str, folder: str, execute: Callable[[], None], found_in: bool = False) -> None:
        sys.argv = [argv0, *self.arguments]
        if not getattr(sys.flags, "safe_path", False):
            sys.path[:1] = [folder]
        elif found_in:  # its modules are found in the folder
            sys.path.insert(0, folder)
        # Keep the current main module alive: its functions have not returned.
        _former_mains.append(sys.modules["__main__"])
        main = sys.modules["__main__"] = ModuleType("__main__")
        vars(main).update(__builtins__=builtins, __annotations__={})
        try:
            execute()
        except SystemExit:
            raise
        except BaseException:
            hook = sys.excepthook  # the program's own, if it has set one

            def without_our_frames(
                kind: type[BaseException], error: BaseException, traceback: TracebackType | None
            ) -> None:
                error.__traceback__ = _below(traceback)
                hook(kind, error, error.__traceback__)

            sys.excepthook = without_our_frames
            raise


_former_mains: list[ModuleType] = []


def _run_module(name: str, *, alter_argv: bool) -> None:
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _run_code(content: bytes, filename: str) -> None:
    code = pkgutil.read_code(io.BytesIO(content))
    loader: Any = importlib.machinery.BuiltinImporter  # as python has for the standard input
    if filename != _STANDARD_INPUT:
        kind = importlib.machinery.SourceFileLoader if code is None else importlib.machinery.SourcelessFileLoader
        loader = kind("__main__", filename)
    if code is None:
        code = compile(content, filename, "exec", dont_inherit=True)
    names = vars(sys.modules["__main__"])
    names.update(__file__=filename, __cached__=None, __loader__=loader)
    exec(code, names)


def _below(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this module and its callers."""
    ours = {function.__code__ for function in (_run_code, _run_module)}
    link = traceback
    while link is not None:
        if link.tb_frame.f_code in ours:
            return link.tb_next
        link = link.tb_next
    return traceback
