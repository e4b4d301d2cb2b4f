"""Find tiles for `decode_step` on this GPU: warps at once, keys of a tile, warps, stages.

    python kernels/bench/tune.py --seconds 240 --out tiles.csv
    python kernels/bench/tune.py --dry-run         # anywhere: every setting once, on the CPU

All tiles are compiled and compared with the reference side by side, each in a process of its own.
Those that agree are timed in turn; the present setting comes first. Nothing is changed:
the table says what to write into `configs.py`.
"""

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from cases import MODELS, Case, Work, build  # noqa: E402
from pool import Ended, Pool, Row, Unit, emit, output, sentence  # noqa: E402
from timing import replay  # noqa: E402
from worker import examine  # noqa: E402

from kvsearch_kernels import configs  # noqa: E402
from kvsearch_kernels.configs import Tile  # noqa: E402
from kvsearch_kernels.packed_attention import triton_args  # noqa: E402

VARIANTS = ("4", "r4", "8", "2", "16")  # in order of priority
SHAPES = (("llama2-7b", 8, 4096), ("llama3-8b", 8, 32768))
HEADS = {m.name: m for m in MODELS}
ROWS = 8  # least query heads of a group
SECONDS = 0.1  # of replays of a setting
SLACK = 45.0  # seconds beyond a third of all, to import and to compile


@dataclass(frozen=True)
class Setting:
    """What is tried.

    Attributes:
        at_once: warps that a multiprocessor is taken to run; programs are shared out by it.
        columns: keys of a tile.
        warps, stages: of a program.
    """

    at_once: int
    columns: int
    warps: int
    stages: int

    @property
    def tile(self) -> tuple[int, int, int]:
        """What is compiled anew."""
        return self.columns, self.warps, self.stages


PRESENT = Setting(configs.DECODE_WARPS, *(asdict(configs.DECODE[128, 2])[k]
                                             for k in ("columns", "warps", "stages")))  # fmt: skip


def settings() -> Iterator[Setting]:
    """All of them, the present one first."""
    yield PRESENT
    every = (Setting(*x) for x in product((8, 4, 6, 12, 16), (32, 64), (1, 2), (3,)))
    # first the present tile with other numbers of warps at once, which compiles nothing
    yield from sorted((x for x in every if x != PRESENT), key=lambda x: x.tile != PRESENT.tile)


def use(at: Setting) -> None:
    """Let decoding in 16 bits with 128 channels go by `at`, in this process."""
    configs.DECODE[128, 2] = Tile(ROWS, at.columns, at.warps, at.stages)
    configs.DECODE_LOADED[128] = at.columns, at.warps
    for module in (configs, triton_args):
        vars(module)["DECODE_WARPS"] = at.at_once


def anew(work: Work) -> None:
    """Forget the plan of a layer, which was made for another setting."""
    work.args[3].known.clear()


def case(variant: str, shape: tuple[str, int, int]) -> Case:
    """What is timed."""
    model, batch, slots = shape
    return Case("decode_step", HEADS[model], batch, slots, variant)


def check(at: dict[str, int], variant: str) -> None:
    """Compile a tile and compare it with the reference; raises if it is wrong."""
    use(Setting(**at))
    if reason := examine(case(variant, SHAPES[0]), "cuda", torch.bfloat16, "triton"):
        raise AssertionError(reason)


def clock(todo: list[tuple[str, dict[str, int]]]) -> None:
    """Time settings, shape by shape."""
    for shape in SHAPES:
        for variant in dict.fromkeys(v for v, _ in todo):
            torch.cuda.empty_cache()
            work = build(case(variant, shape), "cuda", 0, tiny=False, dtype=torch.bfloat16)
            other = build(case(variant, shape), "cuda", 1, tiny=False, dtype=torch.bfloat16)
            for at in [a for v, a in todo if v == variant]:
                use(Setting(**at))
                anew(work), anew(other)
                row = {"variant": variant, "model": shape[0], "batch": shape[1],
                       "slots": shape[2], **at}  # fmt: skip
                try:
                    times = replay([x.run("triton") for x in (work, other)], SECONDS)
                except Exception as error:
                    emit(**row, note=sentence(error))
                    continue
                emit(**row, us=median(times) * 1e3)


def agreeing(pool: Pool, limit: float, workers: int) -> list[tuple[str, dict[str, int]]]:
    """Variants and settings whose tile agrees with the reference; says why others do not."""
    tiles = {at.tile: at for at in settings()}
    every = {f"{v} {tile}": (v, tile) for v, tile in product(VARIANTS, tiles)}
    units = [
        Unit(name, "tune:check", {"at": asdict(tiles[tile]), "variant": v}, limit)
        for name, (v, tile) in every.items()
    ]
    good = set[tuple[str, tuple[int, int, int]]]()

    def heard(unit: Unit, said: Row | Ended) -> None:
        if isinstance(said, Ended) and said.how == "done":
            good.add(every[unit.name])
        elif isinstance(said, Ended):
            print(f"{unit.name}: {said.reason}", file=sys.stderr)

    pool.run(units, heard, width=workers, end=time.monotonic() + limit)
    return [(v, asdict(at)) for v in VARIANTS for at in settings() if (v, at.tile) in good]


def dry_run() -> int:
    """Every setting and variant once, on the CPU and at a tiny shape, by the reference."""
    for at in settings():
        use(at)
        assert configs.decode_tile(128, 2, 1, loaded=False, lookups=False).columns == at.columns
    for variant in VARIANTS:
        if reason := examine(case(variant, SHAPES[0]), "cpu", torch.bfloat16, "reference"):
            raise RuntimeError(f"{variant}: {reason}")
    use(PRESENT)
    print(f"dry run: {len([*settings()])} settings of {len(VARIANTS)} variants; nothing was timed")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=240.0, help="about how long all may take")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, no timing")
    parser.add_argument("--out", type=Path, default=HERE / "tiles.csv")
    args = parser.parse_args(argv)
    if args.dry_run:
        return dry_run()
    end = time.monotonic() + args.seconds
    rows: list[Row] = []

    def heard(unit: Unit, said: Row | Ended) -> None:
        if not isinstance(said, Ended):
            rows.append(said)
        elif said.how != "done":
            print(f"{unit.name}: {said.reason}", file=sys.stderr)

    with TemporaryDirectory() as folder:
        pool = Pool(Path(folder) / "log.txt")
        pool.run([Unit("about", "timing:about", {}, 180)], heard)
        if not rows:
            return 1
        about = rows.pop()
        todo = agreeing(pool, args.seconds / 3 + SLACK, args.workers)
        pool.run([Unit("timing", "tune:clock", {"todo": todo}, args.seconds)], heard, end=end)
    always = {k: about[k] for k in ("gpu", "driver", "torch", "triton")}
    always["commit"] = output(["git", "describe", "--always", "--dirty"], cwd=HERE)
    columns = ("variant", "model", "batch", "slots", *asdict(PRESENT), "us", "note")
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*columns, *always), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | always for row in rows)
    _show(rows)
    return 0


def _show(rows: Sequence[dict[str, Any]]) -> None:
    """For each variant and shape the present setting, and the best one."""
    timed: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if "us" in row:
            key = tuple(row[k] for k in ("variant", "model", "batch", "slots"))
            timed.setdefault(key, []).append(row)
    for key, some in timed.items():
        best = min(some, key=lambda row: row["us"])
        now = next((r["us"] for r in some if {k: r[k] for k in asdict(PRESENT)} == asdict(PRESENT)),
                   None)  # fmt: skip
        what = ", ".join(f"{best[k]} {k}" for k in asdict(PRESENT))
        before = f", was {now:.1f}" if now is not None else ""
        print(f"{' '.join(map(str, key)):32} {best['us']:8.1f} us{before}: {what}")


if __name__ == "__main__":
    raise SystemExit(main())
