"""Real ``python -m django runjobs …`` processes that work on the test's own database."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from django.db import connection

from .waiting import wait_for

ROOT = Path(__file__).resolve().parent.parent


def slow(test: Callable[..., None]) -> Any:
    """Marks a test that takes a minute: it runs with ``-m slow``, or along with all others under RWS_JOBS_SLOW=1."""
    return test if os.environ.get("RWS_JOBS_SLOW") else pytest.mark.slow(test)


class Process:
    """A started process; its stderr goes to a file."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as stderr:
            # A session of its own: what is left of it, children too, can be killed as one group.
            self._popen = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=stderr, stderr=stderr, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def log(self) -> str:
        """All that it has written."""
        return self._log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait_for_log(self, text: str, timeout: float = 30.0) -> None:
        """Until it has written ``text``; at once an AssertionError when it ends without."""

        def written() -> bool:
            ended = not self.running
            assert text in self.log or not ended, f"ended without {text!r}: {self.log}"
            return text in self.log

        wait_for(written, timeout=timeout, what=f"{text!r} in the log of {self._popen.args}")

    def started(self) -> Self:
        """Once it works."""
        self.wait_for_log("working on")
        return self

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit code."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self._popen.args} still runs after {timeout:g} s: {self.log}") from None

    def kill(self) -> None:
        """SIGKILL to all of it."""
        if self.running:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()


class Processes:
    """Starts processes, and kills at its end what is left of them.

    ``folder`` takes logs, gates and generated modules. Each process imports ``tests.settings``, with the name of the
    test's database.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._started:
            process.kill()

    def runjobs(self, *arguments: str, settings: str = "", jobs: str = "", prefix: Sequence[str] = ()) -> Process:
        """Start ``runjobs`` with these arguments.

        ``settings`` is Python source that follows ``tests.settings``; ``jobs`` the source of the ``jobs`` module of one
        more installed app; ``prefix`` a command that runs the rest of the line.
        """
        number = len(self._started) + 1
        module = "tests.settings"
        if settings or jobs:
            module = f"settings_{number}"
            lines = ["from tests.settings import *", settings]
            if jobs:
                app = self.folder / f"app_{number}"
                app.mkdir()
                (app / "__init__.py").touch()
                (app / "jobs.py").write_text(jobs)
                lines.append(f"INSTALLED_APPS = [*INSTALLED_APPS, 'app_{number}']")
            (self.folder / f"{module}.py").write_text("\n".join(lines) + "\n")
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": module,
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "RWS_JOBS_TEST_LIVE_NAME": str(connection.settings_dict["NAME"]),
        }
        command = [*prefix, sys.executable, "-m", "django", "runjobs", *arguments]
        process = Process(command, environment, self.folder / f"process_{number}.log")
        self._started.append(process)
        return process
