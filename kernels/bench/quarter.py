"""What only a GPU can answer, in order of worth, in as long as one is at hand.

    python kernels/bench/quarter.py --minutes 12 --out DIR [--model FILE]
    python kernels/bench/quarter.py --stand-in --out DIR      # anywhere: tiny shapes on the CPU

Stages come in the order that `--help` gives, each in processes of its own. A unit of a stage that
fails, or hangs beyond its limit, costs only itself. `DIR/records.jsonl` has every row as soon as it
is known. The same command goes on where it was stopped, and does anew only what other code, another
card or other versions would answer otherwise. `derive.py` makes tables of the records.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from types import FrameType
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import derive  # noqa: E402
from pool import Ended, Pool, Row, Unit, output  # noqa: E402

KERNELS = ("kernels/kvsearch_kernels/**/*.py",)
CACHE = (*KERNELS, "kvsearch/cache/**/*.py", "kvsearch/policy/*.py", "kvsearch/rules/*.py")
ALL = (*KERNELS, "kvsearch/**/*.py")
OURS = ("pool.py", "timing.py")  # of this folder, and what every stage has beside them
DONE = ("done", "skipped", "failed", "stopped")  # a later call leaves these as they are
DTYPES = ("bfloat16", "float16")
DECODED = "decode_step"
FORMATS = ("16", "8", "4", "2", "1", "r4")
SLACK = 15.0  # seconds in which the last stage's processes are ended and tables are written
LOG = 2 << 20  # bytes of the log that are kept


@dataclass(frozen=True)
class Stage:
    """Units that answer one question.

    Attributes:
        letter, title: what it is called.
        share: of the time, in minutes of twelve.
        units: in order of worth.
        sources: patterns of files whose change makes it run anew.
        width: processes side by side.
    """

    letter: str
    title: str
    share: float
    units: Sequence[Unit]
    sources: Sequence[str]
    width: int = 1


TITLES = {
    "a": ("probes of all ops", 2), "b": ("tests/gpu", 3), "c": ("decoded tokens", 3),
    "d": ("whole prompts", 1), "e": ("the main job, and a search on a large model", 3),
    "f": ("attention against FlexAttention, SDPA and the bandwidth", 1),
    "g": ("counters of ncu", 0.5), "ops": ("every shape of the ops that --ops names", 4),
}  # fmt: skip


def stages(
    stand_in: bool, model: Path | None, names: Sequence[str], ops: Sequence[str]
) -> list[Stage]:
    """All stages, in order of worth.

    Args:
        stand_in: tiny shapes on the CPU.
        model: of the main job.
        names: of all ops.
        ops: of the last stage.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    bench = [f"kernels/bench/{name}" for name in OURS]
    timed = [*bench, "kernels/bench/worker.py", "kernels/bench/cases.py", "kernels/bench/steps.py",
             "kernels/bench/compactions.py"]  # fmt: skip
    whole = [*bench, "kernels/bench/decoding.py", *CACHE]
    cells = [("tiny", 96, 1), ("tiny", 64, 2)] if stand_in else CELLS
    compiled = [list(cell) for cell in cells[:2] if not stand_in]
    prompts = [("tiny", 320, 1)] if stand_in else [("llama2-7b", 32768, 1)]
    large = "tiny" if stand_in else "llama2-7b"
    flex = [(256, 64)] if stand_in else [(4096, 1024), (16384, 1024)]
    given = {"model": None if model is None else str(model.resolve())}
    return [
        Stage("a", *TITLES["a"], [*_probes(names, stand_in)], [*timed, *KERNELS],
              1 if stand_in else min(16, max(2, cpus))),
        Stage("b", *TITLES["b"], [
            Unit("tests/gpu", "jobs:tests", {"workers": 1 if stand_in else min(14, cpus)}, 600),
            Unit("torch compiles full caches", "decoding:compile_ahead", {"cells": compiled}, 240),
        ], [*bench, *ALL, "tests/*.py", "tests/gpu/*.py"], 1 if stand_in else 2),
        Stage("c", *TITLES["c"], [*_decoded(cells, stand_in)], whole),
        Stage("d", *TITLES["d"], [
            Unit(f"prompt {m} {n}x{b} {cache}", "decoding:prompt",
                 {"model": m, "context": n, "batch": b, "cache": cache}, 60, 3)
            for m, n, b in prompts
            for cache in ("full", "scored+rotated4", "scored", "window+rotated4")
        ], whole),
        Stage("e", *TITLES["e"], [
            Unit("kvsearch run", "jobs:main_job", given, 240),
            Unit(f"search {large}", "jobs:search_large", {"model": large}, 150, 10),
        ], [*bench, "kernels/bench/jobs.py", *ALL]),
        Stage("f", *TITLES["f"], [
            Unit("read bandwidth", "worker:roof"),
            Unit(DECODED, "worker:clock", {
                "op": DECODED, "impls": ["triton", "sdpa"], "dtype": DTYPES[0],
                "models": ["smollm2-135m" if stand_in else "llama2-7b"],
                "contexts": [4096] if stand_in else [4096, 32768], "variants": FORMATS,
            }, 60),
            *(Unit(f"{pattern} {T}", "versus:compare",
                   {"pattern": pattern, "context": T, "slots": slots}, 60, 5)
              for T, slots in flex for pattern in ("window", "ladder", "anchors")),
        ], [*timed, "kernels/bench/versus.py", *CACHE]),
        Stage("g", *TITLES["g"],
              [Unit("ncu", "counters:counted", {}, 5 if stand_in else 120)],
              [*timed, "kernels/bench/counters.py", *KERNELS]),
        Stage("ops", *TITLES["ops"], [
            Unit(f"times of {op}", "worker:clock", {
                "op": op, "impls": ["triton", "sdpa", "flash-attn"], "dtype": DTYPES[0],
                "models": ["smollm2-135m"] if stand_in
                else ["llama2-7b", "llama3-8b", "smollm2-135m"],
            }, 240) for op in ops
        ], [*timed, *KERNELS]),
    ]  # fmt: skip


# A model, tokens of a prompt, and sequences: of Llama-2-7B's 32 KV heads, or of Mistral-7B's 8,
# where 32 would need more memory than a card has. In order of worth.
CELLS = [
    ("llama2-7b", 4096, 1), ("mistral-7b", 32768, 8), ("llama2-7b", 32768, 1),
    ("llama2-7b", 4096, 8), ("mistral-7b", 4096, 32), ("mistral-7b", 32768, 1),
    ("mistral-7b", 32768, 32), ("llama2-7b", 32768, 8),
]  # fmt: skip


def _probes(names: Sequence[str], stand_in: bool) -> Iterator[Unit]:
    for dtype in DTYPES[:1] if stand_in else DTYPES:
        for op in names:
            yield Unit(f"probe {op} {dtype}", "worker:gate", {"op": op, "dtype": dtype}, 140)
    for variant in FORMATS[:1] if stand_in else FORMATS:
        asked = {"op": DECODED, "model": "llama2-7b", "variant": variant, "dtype": DTYPES[0]}
        yield Unit(f"{DECODED} {variant}", "worker:compare", asked, 90)
    yield Unit("loops of the CPU", "worker:loops", {}, 110)


def _decoded(cells: Sequence[tuple[str, int, int]], stand_in: bool) -> Iterator[Unit]:
    for number, (model, context, batch) in enumerate(cells):
        caches = ["full", "static", "scored+rotated4", "window+rotated4", "compiled"]
        if number == 0:
            caches.append("full, ours")
        if stand_in and number:
            caches = ["full", "scored+rotated4"]
        for cache in caches:
            asked = {"model": model, "context": context, "batch": batch, "cache": cache}
            name = f"decode {model} {context}x{batch} {cache}"
            limit = 120.0 if cache == "compiled" else 75.0
            yield Unit(name, "decoding:decode", asked, limit, 20 if cache == "compiled" else 3)


class Records:
    """The lines of `records.jsonl`: one for each call of the command, and one for each row."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        self.rows = derive.lines(path)
        whole = b"".join(json.dumps(row).encode() + b"\n" for row in self.rows)
        if path.exists() and path.read_bytes() != whole:  # a line that a kill cut off
            draft = path.with_suffix(".part")
            draft.write_bytes(whole)
            draft.replace(path)
        self.session = 1 + max((row["session"] for row in self.rows), default=0)

    def add(self, **row: Any) -> None:
        """Write a line, at once and whole."""
        row = {"session": self.session} | row
        with self._lock:
            self.rows.append(row)
            with self._path.open("ab", buffering=0) as file:
                file.write(json.dumps(row).encode() + b"\n")

    def ended(self, key: str) -> str | None:
        """How the unit of that key ended when it last ran."""
        found = [x["ended"] for x in self.rows if x.get("key") == key and "ended" in x]
        return found[-1] if found else None


def digest(patterns: Sequence[str]) -> str:
    """Of the files that a stage's answers depend on."""
    made = hashlib.sha256()
    for file in sorted({x for pattern in patterns for x in ROOT.glob(pattern)}):
        made.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return made.hexdigest()


class Quarter:
    """One call of the command.

    Attributes:
        records, pool: where rows go, and what runs units.
        about: the GPU and versions.
        stages: all of them.
    """

    def __init__(self, out: Path, stand_in: bool, again: bool, limit: float) -> None:
        self.records, self.about = Records(out / "records.jsonl"), dict[str, Any]()
        self.pool, self.stages = Pool(out / "log.txt"), list[Stage]()
        self.stand_in, self.again, self.limit = stand_in, again, limit

    def look(self) -> str | None:
        """Find the GPU and versions; returns why nothing can run, or None."""
        for method in ("forkserver", "spawn"):  # where a fork cannot use CUDA, imports come anew
            self.pool.method, rows, ends = method, list[Row](), list[Ended]()

            def heard(_: Unit, said: Row | Ended, rows: Any = rows, ends: Any = ends) -> None:
                (ends if isinstance(said, Ended) else rows).append(said)

            self.pool.run([Unit("about", "timing:about", {}, 180)], heard)
            if rows:
                self.about = rows[0]
                return None
            reason = str(ends[-1].reason)
            if "forked subprocess" not in reason:
                break
        return reason.removeprefix("RuntimeError: ")

    def key(self, unit: Unit, sources: str) -> str:
        """What a unit's answer depends on."""
        machine = [self.about[k] for k in ("gpu", "torch", "triton", "transformers")]
        asked = [unit.name, unit.call, dict(unit.options), sources, machine, self.stand_in]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]

    def due(self, stage: Stage) -> list[tuple[Unit, str]]:
        """Units that have no answer yet, with their keys."""
        sources = digest(stage.sources)
        over = DONE[:2] if self.again else DONE
        keyed = [(unit, self.key(unit, sources)) for unit in stage.units]
        return [(unit, key) for unit, key in keyed if self.records.ended(key) not in over]

    def run(self, stage: Stage, due: Sequence[tuple[Unit, str]], end: float) -> None:
        """Run units of a stage until `end`."""
        keys = {unit.name: key for unit, key in due}
        units = [self._told(replace(u, limit=min(u.limit, self.limit)), key) for u, key in due]
        shared = {"stage": stage.letter}
        begun = time.monotonic()

        def heard(unit: Unit, said: Row | Ended) -> None:
            known = shared | {"unit": unit.name, "key": keys[unit.name]}
            if isinstance(said, Ended):
                row = {"ended": said.how, "reason": said.reason, "seconds": said.seconds}
                self.records.add(**known, **row)
                print(f"{stage.letter} {unit.name}: {said.how} after {said.seconds:.0f} s"
                      + (f": {said.reason}" if said.reason else ""), flush=True)  # fmt: skip
            else:
                self.records.add(**known, row=said)

        self.pool.run(units, heard, width=stage.width, end=end)
        left = len(keys) - len({x["unit"] for x in self.records.rows if x.get("key") in
                                keys.values() and "ended" in x and x["ended"] in DONE})  # fmt: skip
        print(f"{stage.letter}, {stage.title}: {time.monotonic() - begun:.0f} s, {left} units left",
              flush=True)  # fmt: skip

    def proved(self) -> bool:
        """Whether all ops have passed their probes on this card, as they are."""
        (stage,) = (x for x in self.stages if x.letter == "a")
        sources = digest(stage.sources)
        probes = [unit for unit in stage.units if unit.call == "worker:gate"]
        return all(self.records.ended(self.key(u, sources)) == "done" for u in probes)

    def _told(self, unit: Unit, key: str) -> Unit:
        """A unit, with what earlier rows say that it should know."""
        more: dict[str, Any] = {}
        if unit.call == "jobs:tests":
            rows = [x["row"] for x in self.records.rows if x.get("key") == key and "row" in x]
            over = {x["test"] for x in rows if not self.again or x["outcome"] != "failed"}
            more = {"done": sorted(over), "proved": self.proved()}
        elif unit.call in ("jobs:main_job", "jobs:search_large"):
            more = {"folder": str(Path(os.environ.get("TMPDIR", "/tmp")) / f"quarter-{key}")}
        return replace(unit, options={**unit.options, **more}) if more else unit


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="What only a GPU can answer. Stages: "
        + "; ".join(f"{letter}: {title}" for letter, (title, _) in TITLES.items())
    )
    parser.add_argument("--minutes", type=float, default=12.0, help="that all may take")
    parser.add_argument("--out", type=Path, required=True, help="folder of records; it goes on")
    parser.add_argument("--model", type=Path, help="local .gguf file or folder for the main job; "
                        "without it, a random model of SmolLM2-135M's shape")  # fmt: skip
    parser.add_argument("--only", default="a,b,c,d,e,f,g", help="stages, with commas between them")
    parser.add_argument("--ops", default="", help="ops of the stage `ops`, likewise")
    parser.add_argument("--again", action="store_true", help="also what failed or was stopped")
    parser.add_argument("--limit", type=float, default=600.0, help="most seconds of a unit")
    parser.add_argument("--commit", help="of the sources, where there is no git to ask")
    parser.add_argument("--stand-in", action="store_true", help="tiny shapes on the CPU")
    args = parser.parse_args(argv)
    args.only, args.ops = args.only.split(","), [op for op in args.ops.split(",") if op]
    if args.ops and "ops" not in args.only:
        args.only.append("ops")
    if unknown := {*args.only} - {*TITLES}:
        parser.error(f"there is no stage {min(unknown)!r}; there are {', '.join(TITLES)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 2 where nothing can run."""
    args = parsed(argv)
    start = time.monotonic()
    if args.model is not None and not args.model.exists():
        print(f"there is no file {args.model}; give --model another one, or leave it out",
              file=sys.stderr)  # fmt: skip
        return 2
    if args.stand_in:
        os.environ |= {"KVSEARCH_STAND_IN": "1", "CUDA_VISIBLE_DEVICES": ""}
    args.out.mkdir(parents=True, exist_ok=True)
    quarter = Quarter(args.out, args.stand_in, args.again, args.limit)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ended_by(quarter))
    if (reason := quarter.look()) is not None:
        print(reason, file=sys.stderr)
        return 2
    names = quarter.about.pop("ops")
    if unknown := {*args.ops} - {*names}:
        print(f"there is no op called {min(unknown)!r}; there are {', '.join(names)}",
              file=sys.stderr)  # fmt: skip
        return 2
    commit = args.commit or output(["git", "describe", "--always", "--dirty"], cwd=ROOT)
    about = {**quarter.about, "commit": commit, "stand_in": args.stand_in}
    quarter.records.add(about=about, started=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()))
    print(f"{about['gpu']}, driver {about['driver']}, torch {about['torch']}, "
          f"triton {about['triton']}, commit {commit}", flush=True)  # fmt: skip
    quarter.stages = stages(args.stand_in, args.model, names, args.ops)
    wanted = [stage for stage in quarter.stages if stage.letter in args.only]
    due = [(stage, units) for stage in wanted if (units := quarter.due(stage))]
    end = start + args.minutes * 60 - (SLACK if not args.stand_in else 0)
    for number_, (stage, units) in enumerate(due):
        now = time.monotonic()
        shares = sum(other.share for other, _ in due[number_:])
        quarter.run(stage, units, now + (end - now) * stage.share / shares)
    log = args.out / "log.txt"
    if log.stat().st_size > LOG:
        log.write_bytes(log.read_bytes()[-LOG:])
    text = derive.text(quarter.records.rows)
    (args.out / "tables.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def _ended_by(quarter: Quarter) -> Any:
    def end(number: int, frame: FrameType | None) -> None:
        quarter.pool.kill()
        os._exit(128 + number)

    return end


if __name__ == "__main__":
    raise SystemExit(main())
