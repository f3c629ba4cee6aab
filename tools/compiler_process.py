"""A compiler in a process of its own: LLVM ends the process where it finds its input wrong, and prints pages first."""

import contextlib
import multiprocessing
import os
import re
import tempfile
from dataclasses import replace
from multiprocessing.connection import Connection
from types import TracebackType

from kernel_variants import Result, Variant, compile_variant

_TELLING = re.compile(r"^.*(?:error: |LLVM ERROR|Assertion|failed).*$", re.MULTILINE)


class CompilerProcess:
    """Compiles one variant after another; a variant that ends the process gets that as its fault.

    >>> with CompilerProcess() as compiler:  # doctest: +SKIP
    ...     result = compiler.compile(variant)
    """

    def __enter__(self) -> "CompilerProcess":
        self._log = tempfile.NamedTemporaryFile()
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        self._process.join()
        self._log.close()

    def compile(self, variant: Variant) -> Result:
        os.truncate(self._log.name, 0)
        try:
            self._connection.send(variant)
            result: Result = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            result = Result(fault=f"the compiler ended its process with {self._process.exitcode}")
            self._start()
        self._log.seek(0)
        telling = _TELLING.search(self._log.read().decode(errors="replace"))
        if result.fault is not None and telling is not None:
            result = replace(result, fault=f"{result.fault}; {telling[0].strip()[:300]}")
        return result

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._log.name), daemon=True)
        self._process.start()
        theirs.close()


def _serve(connection: Connection, log: str) -> None:
    """Answer variants with results until the other end is closed; what compilers print goes to the log."""
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with contextlib.suppress(EOFError):
        while True:
            connection.send(compile_variant(connection.recv()))
