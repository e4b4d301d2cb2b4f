"""A connection to Ray: an address, or a small cluster started on this machine."""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvsearch.errors import KvsearchError, quoted

_STORE = 256 * 2**20  # bytes of Ray's object store on this machine; only NLL passes through it
_PREFIX, _LOCK = "kvray-", ".lock"  # folders of clusters started here; the driver holds the lock
_YOUNG = 60  # seconds in which a folder may not be locked yet


def require_ray() -> None:
    """Raise a `KvsearchError` where Ray is not installed."""
    if find_spec("ray") is None:
        raise KvsearchError("Ray is not installed: pip install 'kvsearch[ray]'")


class Cluster:
    """Ray, connected.

    Args:
        address: of a cluster, or `local` to start one here.
        cpus: of a cluster started here: as many as there are actors, whatever the machine has.

    Raises:
        KvsearchError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, address: str, cpus: int) -> None:
        require_ray()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # and silence its warning
        import ray

        self.ray: Any = ray
        self._mine, self._folder = not ray.is_initialized(), ""
        self._aside = contextlib.ExitStack()
        if self._mine:
            self._connect(address, cpus)

    def has(self, resource: str) -> int:
        """Whole units of `CPU` or `GPU` in the cluster."""
        return int(self.ray.cluster_resources().get(resource, 0))

    def close(self) -> None:
        """Leave; a cluster started here ends."""
        if self._mine and self.ray.is_initialized():
            self.ray.shutdown()
        self._aside.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.release()

    def _connect(self, address: str, cpus: int) -> None:
        how: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
        if address == "local":
            _remove_stale_folders()
            self._folder = tempfile.mkdtemp(prefix=_PREFIX)  # short: sockets are put inside
            self._lock = FileLock(os.path.join(self._folder, _LOCK))
            self._lock.acquire(timeout=0)
            how |= {"num_cpus": cpus, "include_dashboard": False, "_temp_dir": self._folder}
            # by default Ray runs its workers at a lower priority (nice 15)
            how |= {"object_store_memory": _STORE, "_system_config": {"worker_niceness": 0}}
        # Ray prints on stdout that an actor was killed, and stdout is for results
        self._aside.enter_context(contextlib.redirect_stdout(sys.stderr))
        ours = signal.getsignal(signal.SIGTERM)
        try:
            self.ray.init(address=address, **how)
        except Exception as e:
            with contextlib.suppress(Exception):
                self.close()
            text = " ".join(str(e).split())[:200]
            raise KvsearchError(f"cannot reach the Ray cluster {quoted(address)}: {text}") from e
        finally:  # Ray's handler raises `SystemExit`
            if callable(ours) and signal.getsignal(signal.SIGTERM) is not ours:
                signal.signal(signal.SIGTERM, ours)


def _remove_stale_folders() -> None:
    """Remove folders of drivers that were killed: their lock is free."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, Timeout):  # of another user, or in use
            lock, age = folder / _LOCK, time.time() - folder.lstat().st_mtime
            if age > _YOUNG and lock.exists() and not folder.is_symlink():
                with FileLock(lock, timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)
