"""Drivers that start at once: this process imports everything, then forks one for every request.

A test that kills 50 drivers would otherwise spend its time importing. Requests and answers are
lines of JSON: `["start", OUT, ERR, [OPTION, ...]]` -> pid, `["poll", PID]` -> exit code or null.
"""

import json
import os
import sys


def main() -> None:
    import pandas  # noqa: F401  # by pyarrow with its first table
    import ray  # noqa: F401
    import toy

    # what a run imports on its way; nothing of it starts a thread that a fork would miss

    while line := sys.stdin.readline():
        what, *rest = json.loads(line)
        if what == "poll":
            pid, status = os.waitpid(rest[0], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                out, err, options = rest
                for fd, file in enumerate((os.devnull, out, err)):
                    os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC), fd)
                toy.main(options)
                return
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":  # spawned evaluators import this file
    main()
