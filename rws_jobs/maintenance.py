"""The thread beside the pump: heartbeat, schedules, rescue. On a connection of its own, so that no job can starve
it."""

import logging
import threading
import time
from collections.abc import Callable

from django.db import close_old_connections, connections

from .conf import conf
from .liveness import Heart, Watch
from .outages import OutageLog, Patience
from .schedules import tick_schedules

logger = logging.getLogger("rws_jobs")


class Maintenance:
    """Beats, ticks schedules once a second, watches other workers. Survives any database error."""

    def __init__(self, heart: Heart, *, schedules: bool, on_declared_dead: Callable[[], None]) -> None:
        self._heart, self._schedules, self._on_declared_dead = heart, schedules, on_declared_dead
        self._watch = Watch(heart.using)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rws_jobs maintenance", daemon=True)

    def start(self) -> None:
        """Start the thread. The worker's row must be there."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and close its connection."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        patience, log = Patience(), OutageLog("maintenance")
        next_beat = time.monotonic()
        pause = 0.0
        while not self._stop.wait(pause):
            try:
                close_old_connections()
                if time.monotonic() >= next_beat:
                    self._beat()
                    next_beat = time.monotonic() + conf().HEARTBEAT_INTERVAL
                if self._schedules:
                    tick_schedules()
                log.back()
                patience.reset()
                pause = self._until_next_second()
            except Exception as error:
                log.lost(error)
                self._watch.forget()
                pause = patience.wait()
        connections.close_all()

    def _beat(self) -> None:
        if not self._heart.beat():
            logger.error("worker %s was declared dead by another: it registers anew", self._heart.worker)
            self._on_declared_dead()
            return  # the pump first gives back, uncharged, what has not started; a look now would charge it
        self._watch.look()

    def _until_next_second(self) -> float:
        """Schedules fall due at whole seconds; without them only the heartbeat matters."""
        return 1.0 - time.time() % 1.0 + 0.005 if self._schedules else conf().HEARTBEAT_INTERVAL / 2
