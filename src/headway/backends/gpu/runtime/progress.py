"""A line on standard error that says what is being compiled, on a terminal, after a second."""

import shutil
import sys
import threading
import time

_AFTER, _EVERY = 1.0, 0.25  # seconds


class Line:
    """What is being compiled, from the first kernel until none is left: then the line is gone."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.going: list[str] = []
        self.all = 0
        self.idle = threading.Event()
        self.thread: threading.Thread | None = None

    def begin(self, name: str) -> None:
        """A kernel is being compiled."""
        with self.lock:
            if not self.going:
                self.all, self.began = 0, time.monotonic()
                self.idle = threading.Event()
                self.thread = threading.Thread(target=self._show, args=(self.idle,), daemon=True)
                self.thread.start()
            self.going.append(name)
            self.all += 1

    def end(self, name: str) -> None:
        """It is compiled, or failed."""
        with self.lock:
            self.going.remove(name)
            if not self.going:
                self.idle.set()

    def text(self) -> str:
        """The line."""
        with self.lock:
            names = ", ".join(dict.fromkeys(self.going))
            done, seconds = self.all - len(self.going), time.monotonic() - self.began
        return f"headway: compiling kernels, {done} of {self.all} done, {seconds:.0f} s: {names}"

    def _show(self, idle: threading.Event) -> None:
        if idle.wait(_AFTER):
            return
        try:
            while True:
                columns = shutil.get_terminal_size().columns
                self._write(self.text()[: columns - 1])
                if idle.wait(_EVERY):
                    break
            self._write("")
        except (OSError, ValueError):  # the terminal is gone
            return

    def _write(self, text: str) -> None:
        sys.stderr.write("\r\x1b[K" + text)
        sys.stderr.flush()


_line = Line()


class Kernel:
    """A kernel that may have to be compiled: from `begin` until the end of the `with`."""

    def __init__(self, name: str) -> None:
        self.name, self.begun, self.shown = name, False, False

    def begin(self) -> None:
        """It has to be."""
        self.begun = True
        if not self.shown and sys.stderr is not None and sys.stderr.isatty():
            _line.begin(self.name)
            self.shown = True

    def __enter__(self) -> "Kernel":
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            _line.end(self.name)
