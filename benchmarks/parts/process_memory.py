"""Memory of this process, as Linux counts it."""

from __future__ import annotations

import re
import threading
from pathlib import Path


def status(field: str) -> int:
    """Bytes that /proc/self/status gives for ``VmRSS``, ``VmHWM``, ``RssAnon`` or ``RssFile``."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


class AnonymousPeak:
    """The largest RssAnon while it is entered; the kernel keeps no high-water mark of it.

    Args:
        every: seconds between two looks. A look takes some time of its own from whatever is being timed.
    """

    def __init__(self, every: float = 0.002):
        self.every = every

    def __enter__(self) -> AnonymousPeak:
        self.before = self.peak = status("RssAnon")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(self.every):
            self.peak = max(self.peak, status("RssAnon"))

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()
        self.peak = max(self.peak, status("RssAnon"))
