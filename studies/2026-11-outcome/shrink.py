"""Before a finished run is kept as a study: per-token losses become sums over blocks of 64 tokens.

    python studies/2026-11-outcome/shrink.py RUN_DIR ...

Every table follows from the sums, byte for byte (`kvsearch study check RUN_DIR`). Such a run cannot
be continued.
"""

import json
import sys
from pathlib import Path

from kvsearch.results.folder import RunFolder

for place in map(Path, sys.argv[1:]):
    asked = json.loads((place / "study.json").read_text(encoding="utf-8"))
    RunFolder(place, write=False).shrink(asked["settings"]["score_from"] - 1)
