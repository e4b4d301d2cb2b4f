"""Without what transformers, peft and accelerate print of themselves."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from kvsearch.models.read import quiet


@contextmanager
def muted() -> Iterator[None]:
    """No warnings and no log lines inside; what was set before comes back afterwards."""
    before = logging.root.manager.disable
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
