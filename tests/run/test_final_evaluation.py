"""The end of a run: which policy is recommended."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvsearch.policy import ModelShape, Policy
from kvsearch.policy_search.executors.inline import Inline
from kvsearch.policy_search.fixed_list import measure
from kvsearch.policy_search.worker import Job
from kvsearch.policy_space import Setting
from kvsearch.results import run_files
from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Answered, Measurement
from kvsearch.results.records import Kind, Trial
from kvsearch.run.final_evaluation import FinalEvaluation, select_windows
from kvsearch.session.progress import Shown

SHAPE = ModelShape(layers=2, kv_heads=1, head_dim=16, heads=1)
TOKENS, FROM = 528, 16
SETTING = Setting(SHAPE, SHAPE.budget_bytes(32), TOKENS)
LOSSES: dict[str, dict[int, Any]] = {  # nats per token over the full cache, or of each window
    "search": {8: 0.30, 12: 0.20, 16: 0.10},
    "select1": {8: 0.05, 12: 0.12, 16: 0.14},
    "report": {8: 0.20, 12: 0.15, 16: 0.10},
}


class Session:
    """Answers from the table; later windows are harder.

    Attributes:
        ran: windows of the report text by slots.
    """

    ran: ClassVar = Counter[int]()

    def run(self, job: Job) -> Measurement:
        slots, windows = job.policy.slots or 0, job.windows or 1
        at = np.arange(job.first, job.first + windows)[:, None]
        loss = np.broadcast_to(LOSSES[job.part].get(slots, 0.0), 8)[at]
        found = np.broadcast_to(2 + at + loss, (windows, TOKENS - 1)).astype(np.float32)
        self.ran[slots] += windows * (job.part == "report")
        return Measurement(found, windows * TOKENS)

    def forget(self) -> None:
        pass


def ended(
    folder: RunFolder, kinds: dict[int, Kind], losses: dict[int, float] | None = None
) -> list[Trial]:
    """Trials by their slots, with their losses on the search text kept."""
    trials = []
    for number, (slots, kind) in enumerate(kinds.items()):
        policy = Policy(slots=slots, name=str(slots))
        key, nll = policy.fingerprint(SHAPE.layers), 2 + (losses or {}).get(slots, 0.0)
        folder.save_nll("search", key, Measurement(np.full((1, TOKENS - 1), nll, np.float32)))
        size = slots if slots < 20 else 1 << 40
        trials.append(
            Trial(number, str(slots), kind, "complete", policy, key, nll=nll, bytes_peak=size)
        )
    return trials


def final(folder: RunFolder, windows: dict[str, int], **more: Any) -> FinalEvaluation:
    return FinalEvaluation(
        folder, Inline(Session()), SETTING, FROM, Shown(quiet=True), {}, windows, **more
    )


def test_of_near_ties_the_one_that_is_nowhere_far_behind_is_chosen(tmp_path: Path) -> None:
    """By the mean alone it would be 8, which loses most where something is asked."""
    folder, lost = (
        RunFolder(tmp_path / "run"),
        {8: (0.0, 0.020), 12: (0.021, 0.0), 16: (0.0105, 0.0105)},
    )
    trials = ended(folder, dict.fromkeys(lost, "searched"))
    for t in trials:
        text, facts = lost[t.policy.slots or 0]
        answers = tuple(
            Answered(of, f"{of} {i}", 1.0, [], []) for i in (0, 1) for of in ("text", "facts")
        )
        nll = np.array([text, facts] * 2, np.float32)[:, None]
        for part in ("search", "select1"):
            folder.save_nll(part, t.fingerprint, Measurement(nll, answers=answers))
    chosen = replace(final(folder, {"select1": 4}), score_from=1)
    assert chosen._select([replace(t, bytes_peak=1, windows=4) for t in trials]) == "16"


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("together", [1, 4])
def test_further_windows_follow_on_those_that_are_there(
    slots: int, together: int, tmp_path: Path
) -> None:
    """Of several evaluators with wide jobs they took the place of the first ones."""

    class Evaluators(Inline):
        """Several slots, whose jobs run in the order in which they came."""

        def __init__(self) -> None:
            super().__init__(Session())
            self.slots, self.jobs = slots, list[tuple[int, Job]]()

        def submit(self, slot: int, job: Job) -> None:
            self.jobs.append((slot, job))

        def wait(self) -> Any:
            self._job = self.jobs.pop(0)
            return super().wait()

    folder, policy = RunFolder(tmp_path / "run"), Policy(slots=8)
    key = policy.fingerprint(SHAPE.layers)
    for first, windows in ((0, 1), (1, 2), (2, 4), (4, 8)):
        measure(
            Evaluators(), folder, "report", [policy], SETTING, windows=windows,
            first=first, together=together,
        )  # fmt: skip
        nll = folder.load_nll("report", key).nll
        assert nll[:, 0].tolist() == pytest.approx([2.2 + i for i in range(windows)])


def test_a_record_of_fewer_windows_is_measured_again(tmp_path: Path) -> None:
    """It was joined with itself, and then dropped: a run ended in the words of a damaged one."""
    folder, policy = RunFolder(tmp_path / "run"), Policy(slots=8)
    key = policy.fingerprint(SHAPE.layers)
    for windows in (2, 4):
        measure(Inline(Session()), folder, "report", [policy], SETTING, windows=windows)
        assert folder.load_nll("report", key).nll.shape == (windows, TOKENS - 1)
    folder.close()


@pytest.mark.parametrize(("moved", "best"), [(0.0, "16"), (0.2, "12")])
def test_recommended_is_the_best_on_search_and_select_text_together(
    moved: float, best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOSSES["select1"], 16, 0.14 + moved)
    folder = RunFolder(tmp_path / "run")
    trials = ended(folder, dict.fromkeys((8, 12, 16), "searched"), LOSSES["search"])
    measured = final(folder, dict.fromkeys(LOSSES, 1)).go(trials)
    folder.close()
    # 8 is the best on the select text alone, 16 on the search text
    assert measured.recommended == best
    (tmp_path / "measured.json").write_text(measured.text())
    assert run_files.measured(tmp_path / "measured.json") == measured


def test_a_longer_search_chooses_on_more_text() -> None:
    assert select_windows(20, 1) == 1  # the default run
    assert select_windows(73, 1) == 4
    assert select_windows(8, 3) == 3  # never less than the search's


def test_report_windows_go_to_those_that_are_not_certainly_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOSSES, "select1", {8: 0.5, 10: 0.5, 12: 0.5, 16: 0.0})
    monkeypatch.setitem(LOSSES, "report", {8: 0.2, 10: 0.1, 12: 0.0, 16: 0.0, 20: 0.3})
    folder = RunFolder(tmp_path / "run")
    kinds: dict[int, Kind] = {
        8: "method", 10: "method", 12: "combined", 16: "searched", 20: "searched",
    }  # fmt: skip
    trials, end = ended(folder, kinds), final(folder, {"select1": 1, "report": 5})
    rows = {r.name: r for r in end.go(trials).rows}
    windows = {n: len(folder.load_nll("report", r.fingerprint).nll) for n, r in rows.items()}
    assert end.go(trials).rows == [*rows.values()]  # what is there is not measured again
    folder.close()
    # 10 is as certainly behind as 8, but the best of its kind: the headline compares with it
    assert windows == {"full": 5, "8": 1, "10": 5, "12": 5, "16": 5}
    stopped = rows["8"].stopped
    assert stopped and stopped.mean == pytest.approx(0.1)  # search and report text together
    assert stopped.lo > 0
    assert not any(rows[n].stopped for n in ("full", "10", "12", "16"))


@pytest.mark.parametrize("every", [False, True])
def test_methods_that_are_not_among_the_best_on_the_search_text_have_no_row_unless_asked_for(
    every: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOSSES, "select1", {})
    monkeypatch.setitem(LOSSES, "report", {8: 0.3, 10: 0.1})
    monkeypatch.setattr("kvsearch.run.report_windows.COMPARED", {"method": 1})
    folder = RunFolder(tmp_path / "run")
    kinds: dict[int, Kind] = {8: "method", 10: "method", 12: "method", 16: "searched"}
    trials = ended(folder, kinds, {8: 0.4, 10: 0.2, 12: 0.01})
    found = final(folder, {"select1": 1, "report": 2}, every=every).go(trials)
    folder.close()
    names = [r.name for r in found.rows]
    assert names == (["full", "8", "10", "12", "16"] if every else ["full", "12", "16"])
    assert {n: round(gap.mean, 1) for n, gap in found.behind.items()} == (
        {} if every else {"8": 0.4, "10": 0.2}
    )


def test_starting_points_on_the_front_of_the_search_have_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOSSES, "select1", {})
    monkeypatch.setitem(LOSSES, "report", {8: 0.4, 10: 0.5, 12: 0.3})
    monkeypatch.setattr("kvsearch.run.report_windows.COMPARED", {"earlier": 1})
    folder = RunFolder(tmp_path / "run")
    kinds: dict[int, Kind] = {8: "earlier", 10: "earlier", 12: "earlier", 16: "searched"}
    trials = ended(folder, kinds, {8: 0.4, 10: 0.5, 12: 0.3})
    found = final(folder, {"select1": 1, "report": 2}).go(trials)
    folder.close()
    # 10 loses more than 8 and is larger; 12 is the best of its kind
    assert [r.name for r in found.rows] == ["full", "8", "12", "16"]
    assert [*found.behind] == ["10"]


@pytest.mark.parametrize(("behind", "windows"), [(0.0, 7), (0.3, 2)], ids=["undecided", "clear"])
def test_an_undecided_headline_takes_further_windows(
    behind: float, windows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The combination is certainly behind and gets none; a second call finds all as it was."""
    monkeypatch.setitem(LOSSES, "select1", {8: 0.5, 10: 0.5, 12: 0.5, 16: 0.0})
    monkeypatch.setitem(LOSSES, "report", {8: behind + 0.01, 10: behind, 12: 0.2, 16: 0.0})
    folder = RunFolder(tmp_path / "run")
    trials = ended(folder, {8: "method", 10: "method", 12: "combined", 16: "searched"})
    end = final(folder, {"select1": 1, "report": 7}, each=2)
    for _ in range(2):
        rows = {r.name: r.fingerprint for r in end.go(trials).rows}
        found = {n: len(folder.load_nll("report", key).nll) for n, key in rows.items()}
        most = {"full": windows, "16": windows, "10": windows, "12": 2}
        assert {n: found[n] for n in most} == most and found["8"] <= 2
    folder.close()


def test_further_windows_may_make_another_method_the_best_published_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which goes on from where it stands, and the others from where they do."""
    lucky, unsure = np.repeat([0.1, 0.9], [2, 6]), np.tile([-0.05, 0.45], 4)
    monkeypatch.setitem(LOSSES, "select1", {8: 0.5, 10: 0.5, 16: 0.0})
    monkeypatch.setitem(LOSSES, "report", {8: lucky, 10: unsure, 16: 0.1})
    monkeypatch.setattr(Session, "ran", Counter[int]())
    folder = RunFolder(tmp_path / "run")
    trials = ended(folder, {8: "method", 10: "method", 16: "searched"})
    rows = final(folder, {"select1": 1, "report": 8}, each=2).go(trials).rows
    found = {r.name: len(folder.load_nll("report", r.fingerprint).nll) for r in rows}
    folder.close()
    assert found == {"full": 8, "8": 4, "10": 8, "16": 8}
    assert [Session.ran[n] for n in (0, 8, 10, 16)] == [8, 4, 8, 8]  # and none is measured twice
