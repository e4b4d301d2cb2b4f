"""A plugin of pytest: processes that tests start compile their imports once.

Many container images set PYTHONDONTWRITEBYTECODE; then each of some hundred processes would compile
torch and transformers again, which takes as long as the tests. What is compiled goes into the
user's cache instead, and nothing beside the sources.
"""

import os
import sys
from pathlib import Path

from platformdirs import user_cache_dir

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    folder = str(Path(user_cache_dir("kvsearch")) / "bytecode")
    sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", folder)
    sys.dont_write_bytecode = False
