"""A driver to be killed: runs the fake task in a folder, and goes on if it was there before.

python drive.py FOLDER --executor processes --slots 2 --trials 30
"""

import argparse
import json
import sys
from pathlib import Path

from fake import FakeWork, executor, task

from kvsearch.errors import KvsearchError
from kvsearch.search.driver import Search
from kvsearch.search.folder import RunFolder


def main() -> int:
    ask = argparse.ArgumentParser()
    ask.add_argument("folder", type=Path)
    ask.add_argument("--executor", default="inline")
    ask.add_argument("--slots", type=int, default=1)
    ask.add_argument("--trials", type=int, default=30)
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--sampler", default="random")
    ask.add_argument("--seconds", type=float, default=0.0)
    ask.add_argument("--faults", default="{}")
    ask.add_argument("--log", default="")
    o = ask.parse_args()
    where = None
    try:
        folder = RunFolder(o.folder)
        work = FakeWork(o.log or str(o.folder) + ".log", o.seconds, json.loads(o.faults))
        where = executor(o.executor, o.slots, work)
        Search(task(o.trials, seed=o.seed, sampler=o.sampler), where, folder, lambda *_: None).run()
    except KvsearchError as e:
        print(f"kvsearch: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if where is not None:
            where.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
