"""What a quarter of an hour asks of the whole program: its tests, the main job, a large model."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import pytest
import torch
from decoding import built, config, emptied, require_room, weight_bytes
from pool import ROOT, emit
from timing import device, stands_in

ROW_SECONDS = 0.5  # between looks at what a search has written
# Tests of decoding, of evictions in place and of replayed graphs come first.
FIRST = (
    "test_kernels_give_what_references_give_on_a_cpu",
    "test_one_launch_for_all_intervals_evicts_what_torch_evicts",
    "test_a_captured_step_gives_the_tokens_until_the_next_compaction",
    "test_replayed_tokens_are_those_that_are_computed",
    "test_generate_replays_tokens",
    "test_a_token_launches_no_more_than_was_counted_without_a_gpu",
)
LANE = "tests/cache/test_device.py::test_the_lane_sees"  # what stands in


def tests(workers: int, done: list[str], proved: bool) -> None:
    """Run `tests/gpu`; a row for each test at once, with what it printed.

    Args:
        workers: processes of pytest.
        done: tests that ran before, which are left out.
        proved: whether the probes of all ops have passed here, so that no test need run them.
    """
    if proved:
        os.environ["KVSEARCH_TRITON"] = "1"
    if stands_in():
        asked = [LANE + "_a_wait", LANE + "_tensors_of_two_devices"]
    else:
        asked = ["tests/gpu"]
    how = ["-n", str(workers), "--dist", "load", "--maxschedchunk", "1"] if workers > 1 else ["-n0"]
    left_out = [x for name in done for x in ("--deselect", name)]
    # the project's own options are for a suite of files
    plain = ["-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", "-p", "jobs", "-q"]
    os.chdir(ROOT)
    code = pytest.main([*plain, *how, *asked, *left_out], plugins=[_Told()])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not (
        done and code == pytest.ExitCode.NO_TESTS_COLLECTED
    ):
        raise RuntimeError(f"pytest ended with code {int(code)}; the log has its output")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """As pytest calls it, in each of its processes: the tests of `FIRST` come first."""
    worth = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: worth.get(item.originalname, len(FIRST)))


class _Told:
    """Hands every test's outcome on."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """As pytest calls it, for set-up, call and tear-down of each test."""
        if report.when == "call" or report.outcome != "passed":
            said = report.capstdout.strip()[-400:]
            row = {"test": report.nodeid, "outcome": report.outcome, "said": said,
                   "seconds": round(report.duration, 2)}  # fmt: skip
            if report.outcome == "failed":
                lines = [x[1:].strip() for x in report.longreprtext.splitlines() if x[:1] == "E"]
                row["reason"] = " ".join(lines[:3])[:400] or report.longreprtext[-400:]
            emit(**row)


def main_job(model: str | None, folder: str) -> None:
    """`kvsearch run` on a small model, with its report and decode speeds; a row for each trial.

    Args:
        model: a local file or folder; None makes a random model of SmolLM2-135M's shape.
        folder: of the run, which goes on where it was.
    """
    from kvsearch.cli import main

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if model is None:
        model = str(place / "model")
        if not (place / "model/config.json").is_file():
            _save("tiny" if stands_in() else "smollm2-135m", place / "model")
    text = place / "text.txt"
    text.write_text(local_text(), encoding="utf-8")
    args = ["run", "--model", model, "--text", str(text), "--out", str(place / "run")]
    args += ["--budget", "256"]
    if stands_in():
        args[-1] = "96"
        args += ["--context", "256", "--trials", "0", "--windows", "1", "--report-windows", "1"]
        args += ["--no-bench", "--workers", "0", "--device", "cpu"]
    start = time.monotonic()
    with _watched(place / "run"):
        try:
            main(args)
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"kvsearch run ended with code {ended.code}") from None
    found = json.loads((place / "run/measured.json").read_text())
    emit(finished=round(time.monotonic() - start, 1), measured=_short(found),
         front=(place / "run/front.csv").read_text()[:8000])  # fmt: skip


def search_large(model: str, folder: str) -> None:
    """The search stage on a large model with random weights: what a policy costs there."""
    import kvsearch

    require_room(model, weight_bytes(model) + 2**33)
    loaded = kvsearch.LoadedModel.of(built(model), tokenizer(), model)
    small: dict[str, Any] = {"trials": 2}
    if stands_in():
        small = {"context": 256, "trials": 1, "warm_start": False}
    start = time.monotonic()
    with _watched(Path(folder)):
        kvsearch.search(
            loaded, kvsearch.Text(local_text()), budget_slots=96 if stands_in() else 256,
            windows=1, report_windows=1, bench=False, out=folder, **small,
        )  # fmt: skip
    emit(finished=round(time.monotonic() - start, 1))
    del loaded
    emptied()


@contextmanager
def _watched(run: Path) -> Iterator[None]:
    """Rows of trials that a run writes, as soon as they are there."""
    over, told = Event(), set[str]()

    def look() -> None:
        with suppress(OSError):
            for line in (run / "trials.jsonl").read_text().splitlines():
                with suppress(ValueError):  # a line that is being written
                    trial = json.loads(line)
                    if trial.get("seconds") is not None and line not in told:
                        told.add(line)
                        emit(trial=trial["name"], **_short(trial))

    def watch() -> None:
        while not over.wait(ROW_SECONDS):
            look()

    look()
    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()


def _short(found: dict[str, Any]) -> dict[str, Any]:
    """Numbers and words of a record, without what is long."""
    plain = {k: v for k, v in found.items() if isinstance(v, int | float | str | bool | None)}
    return {k: v for k, v in plain.items() if len(str(v)) < 200 and k != "trial"}


def local_text() -> str:
    """English text that is at hand: this repository's pages."""
    pages = [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("studies/*/README.md"))]
    return "\n\n".join(page.read_text(encoding="utf-8") for page in pages)


def tokenizer() -> Any:
    """One token a byte, and 256 ends a text."""
    from transformers import PreTrainedTokenizerFast

    words = {"type": "Split", "pattern": {"Regex": r"\s+|\S+"}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    core = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}
    plain = {"version": "1.0", "model": core, "pre_tokenizer": words, "added_tokens": [],
             "decoder": {"type": "ByteFallback"}}  # fmt: skip
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_text(json.dumps(plain))
        return PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<end>")


def _save(name: str, folder: Path) -> None:
    """A random model of a known shape, as a local folder."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    made = folder.with_name(folder.name + ".part")
    shutil.rmtree(made, ignore_errors=True)
    with device():
        model = LlamaForCausalLM._from_config(config(name), dtype=torch.bfloat16)
    model.save_pretrained(made)
    tokenizer().save_pretrained(made)
    made.rename(folder)
