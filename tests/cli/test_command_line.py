"""What every command promises: JSON that any program reads, shared options, exit codes."""

import json
import subprocess
import sys
from importlib import import_module
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from kvsearch import Text, evaluate
from kvsearch.cli import COMMANDS, module_of
from kvsearch.cli.output import print_json
from kvsearch.commands.export import export
from kvsearch.commands.run import search
from kvsearch.errors import KvsearchError, ModelError, RunError
from kvsearch.evaluation.answers import answers
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models import load_model
from kvsearch.policy import Channels, Policy
from kvsearch.policy_search.executors import cluster
from kvsearch.rules import Attention
from kvsearch.run import evaluators
from kvsearch.workloads.items import ids
from kvsearch.workloads.prompts.encode import items_of
from kvsearch.workloads.prompts.files import read
from tests.command import call, exit_code

CLI = Path(__file__).resolve().parents[2] / "kvsearch" / "cli"
EMPTY = "the name is empty"
# a search of which little has to be measured, as flags and as arguments
FEW: dict[str, Any] = {
    "budget_slots": 96, "context": 192, "trials": 2, "bench": False, "space": "h2o-int4",
    "portfolio": "none", "windows": 1, "report_windows": 1,
}  # fmt: skip
SEARCH = ["--budget", "96", "--context", "192", "--trials", "2", "--no-bench", "--space",
          "h2o-int4", "--portfolio", "none", "--windows", "1", "--report-windows", "1",
          "--quiet"]  # fmt: skip


def test_a_file_that_ends_too_early_is_nobodys_interruption(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """click takes it for one."""

    def ends(*_: object, **__: object) -> None:
        raise EOFError("Ran out of input")

    monkeypatch.setattr("kvsearch.cli.schema.print_json", ends)
    code, out, err = call(["schema"], capsys)
    assert (code, out) == (1, "") and "should not have happened (EOFError: Ran out" in err


def test_every_command_takes_the_options_of_output(capsys: Any) -> None:
    found: list[tuple[str, click.Command]] = []
    for name in COMMANDS.keys() - {"lm-eval"}:  # all of whose options are those of lm-eval
        command = import_module(module_of(name)).command
        below = command.commands.items() if isinstance(command, click.Group) else [("", command)]
        found += [(f"{name} {part}".strip(), c) for part, c in below]
    assert {name for name, _ in found} >= {"schema", "study check", "study rebuild", "run"}
    for name, command in found:
        taken = {o for p in command.params for o in p.opts}
        assert taken >= {"--json", "--quiet"}, name
        code, out, _ = call([*name.split(), "--help"], capsys)
        assert code == 0 and "--json" in out, name
    assert strict(call(["schema", "--json", "--quiet"], capsys)[1])["properties"]


def strict(text: str) -> Any:
    """JSON as other languages read it: without NaN and Infinity, which Python's parser takes."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null(capsys: Any) -> None:
    print_json({"a": (1.5, float("nan")), "b": [{"c": float("-inf")}], "d": "NaN", "e": True})
    assert strict(capsys.readouterr().out) == {
        "a": [1.5, None], "b": [{"c": None}], "d": "NaN", "e": True,
    }  # fmt: skip
    others = [f.name for f in CLI.glob("*.py") if "json.dumps" in f.read_text("utf-8")]
    assert others == ["output.py"]  # every command prints through it


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "table"])
def test_a_single_scored_token_has_no_interval(
    as_json: bool, tiny_folder: Path, prose: Path, capsys: Any
) -> None:
    argv = ["eval", "h2o", "--model", str(tiny_folder), "--text", str(prose), "--budget", "40",
            "--context", "128", "--score-from", "127", "--quiet"]  # fmt: skip
    code, out, _ = call([*argv, *["--json"][: int(as_json)]], capsys)
    assert code == 0
    if as_json:
        (row,) = strict(out)["results"]
        assert row["nll_se"] is None and row["dnll_full"]["lo"] is row["dnll_full"]["hi"] is None
        assert row["nll"] > 0
    else:
        assert "[no interval]" in out and "nan" not in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["eval", "full", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["eval", "full", "--windows", "0"], "--windows must be at least 1, got 0"),
        (["eval", "full", "--context", "0"], "--context must be at least 1, got 0"),
        (["eval", "full", "--tokens", "3", "--windows", "5"], "3 tokens are too few for 5 windows"),
        (["run", "--windows", "0"], "--windows must be at least 1, got 0"),
        (["run", "--workers", "99999"], "--workers 99999 are more processes than the"),
        (["run", "--report-windows", "0"], "--report-windows must be at least 1, got 0"),
        (["run", "--score-from", "0"], "--score-from must be at least 1, got 0"),
        (["adapt", "anllm-ep", "--out", "o", "--windows", "0"], "--windows must be at least 1"),
        (["export", "p.json", "--windows", "0"], "--windows must be at least 1"),
        (["run", "--budget", "256MB"], "a size in bytes is --budget-bytes"),
        (["eval", "h2o", "--budget-bytes", "5M"], "such as 5000000, 5MB or 4.8MiB"),
        (["eval", "h2o", "--budget-bytes", "0.5"], "such as 5000000, 5MB or 4.8MiB"),
        (["run", "--text", "no.txt"], "there is no text file no.txt"),
        (["run", "--extra-text", "no.txt:0-9"], "there is no text file no.txt"),
        (["eval", "full", "--text", "."], ". is a folder"),
        (["bench", "full", "--text", "no.txt"], "there is no text file"),
        (["export", "p.json", "--text", "no.txt"], "there is no text file"),
        (["adapt", "anllm-ep", "--out", "o", "--held-out", "no.txt"], "there is no text file"),
        (["prune", "kvpruner-01-20", "--out", "o", "--text", "no.txt"], "there is no text file"),
        # an empty name is not the current folder
        (["run", "--out", ""], EMPTY),
        (["run", "--config", "run.yaml"], EMPTY),
        (["run", "--config", ""], EMPTY),
        (["adapt", "anllm-ep", "--out", ""], EMPTY),
        (["prune", "kvpruner-l1-20", "--out", ""], EMPTY),
        (["push", "p.json", "-o", ""], EMPTY),
        (["push", ""], EMPTY),
        (["export", "p.json", "-o", ""], EMPTY),
        (["eval", "full", "--nll-out", ""], EMPTY),
        (["report", ""], EMPTY),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_needs_no_model_is_said_before_one_is_loaded(
    argv: list[str], said: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.json").write_text('{"slots": 64}')
    (tmp_path / "run.yaml").write_text("out: ''\n")
    monkeypatch.setattr("kvsearch.session.load.load_model", None)  # nothing may get that far
    code, out, err = call(argv, capsys)
    assert code == 2 and said in err and out == "" and err.count("\n") == 1
    assert sorted(f.name for f in tmp_path.iterdir()) == ["p.json", "run.yaml"]


def test_a_model_that_gives_nan_is_called_that(tiny_folder: Path) -> None:
    loaded = load_model(str(tiny_folder), device="cpu")
    with torch.no_grad():
        next(loaded.model.parameters()).fill_(torch.nan)
    with pytest.raises(ModelError, match="logits are not finite: its weights are damaged"):
        Evaluator(loaded)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_logits_that_are_not_finite_on_some_text_are_called_that(
    value: float, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One damaged row of the embeddings, which loading does not see."""
    monkeypatch.setattr("kvsearch.models.disk_cache.cache_folder", lambda: tmp_path / "cache")
    loaded = load_model(str(tiny_folder), device="cpu")
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[loaded.tokenizer("Z")["input_ids"]] = value
    said = r"the model's logits are not finite: its weights are damaged, .* float32 holds the most"
    text = Text("a word and another, " * 99 + "Z" + " and so on, and so on" * 99)
    on_text: dict[str, Any] = dict(budget_slots=40, context=256)
    with pytest.raises(ModelError, match=f"on the text {said}"):
        evaluate(["h2o", "kivi4"], loaded, text, windows=14, **on_text)
    h2o = Policy(slots=40, rule=Attention())
    with pytest.raises(KvsearchError, match="met attention that is not finite on the text"):
        export(
            h2o, to="transformers", model=loaded, text=text, context=256, windows=14,
            out=tmp_path / "out",
        )  # fmt: skip
    file = tmp_path / "mine.jsonl"
    for bad in ((3,), range(14)):
        rows = [{"context": f"{i} lies there, " * 9 + "Z" * (i in bad), "question": "Where?",
                 "answer": "mat"} for i in range(14)]  # fmt: skip
        file.write_text("\n".join(map(json.dumps, rows)))
        for policies in ("full", ["h2o", "streamingllm"]):
            with pytest.raises(ModelError, match=f"on prompts of mine.jsonl {said}"):
                evaluate(policies, loaded, prompts=file, budget_slots=60)
    with pytest.raises(ModelError, match=said):
        search(loaded, prompts=file, budget_slots=60, out=tmp_path / "run")
    asked = items_of(loaded, "mine", read(file), "agnostic", lambda _: ids([1]))
    for policy in (h2o, Policy(slots=40, sinks=2)):
        with pytest.raises(KvsearchError, match="not finite on prompts of mine"):
            answers(Evaluator(loaded), policy, asked)


def test_entries_that_a_model_hides_are_no_damage(tiny_folder: Path) -> None:
    loaded = load_model(str(tiny_folder), device="cpu")
    hide = lambda module, given, out: out.index_fill(-1, torch.tensor([0]), -torch.inf)  # noqa: E731
    loaded.model.get_output_embeddings().register_forward_hook(hide)
    Evaluator(loaded)


def stopped(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("begun", [True, False], ids=["in the end", "at the start"])
def test_ctrl_c_prints_the_front_so_far_and_how_to_go_on(
    begun: bool, tiny_folder: Path, prose: Path, tmp_path: Path, capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    where = "run.run.FinalEvaluation" if begun else "session.load.model"
    out = tmp_path / "run"

    def stops(*_: Any, **__: Any) -> None:
        if begun:  # the report is there before the final evaluation
            assert "The run has not ended" in (out / "report.html").read_text("utf-8")
            assert (out / "best.json").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(f"kvsearch.{where}", stops)
    argv = ["run", "--model", str(tiny_folder), "--text", str(prose), *SEARCH, "--out", str(out)]
    code, printed, err = call([*argv, "--json"], capsys)
    assert code == 130 and "the same command goes on from here" in err
    found = strict(printed)
    assert found["interrupted"] is True
    if begun:
        assert found["out"] == str(out) and found["open"].startswith("The run has not ended")
        rows = {r["name"]: r for r in found["rows"]}
        assert rows[found["recommended"]]["within_budget"] and rows["h2o"]["windows"] > 0
        trials = {t["name"]: t for t in found["trials"]}
        assert sum(found["counts"].values()) == len(trials) > 5
        front = [trials[name] for name in found["front"]]
        assert front and front == sorted(front, key=lambda t: t["bytes_peak"])
        assert front == sorted(front, key=lambda t: -t["dnll"])
    else:
        assert found["trials"] == found["front"] == found["rows"] == [] and found["out"] is None
    code, printed, err = call(argv, capsys)  # it went on, and is stopped again
    assert code == 130 and "the same command goes on from here" in err
    assert ("The run has not ended. Losses are of the search part" in printed) == begun
    assert (out / "report.html").exists() == (out / "best.json").exists() == begun


def test_ctrl_c_after_the_selection_keeps_its_choice(
    tiny_folder: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best on the search part was recommended again, whatever the selection had chosen."""
    monkeypatch.setattr("kvsearch.run.final_evaluation.ReportWindows.rows", stopped)
    monkeypatch.setattr("kvsearch.run.run.FinalEvaluation._select", lambda *_: "window+int4")
    with pytest.raises(KeyboardInterrupt) as stop:
        search(str(tiny_folder), str(prose), out=tmp_path / "run", **FEW)
    found = stop.value.summary
    assert found.recommended == "window+int4"
    assert "chosen on the search and the select part" in found.open
    assert json.loads((tmp_path / "run" / "best.json").read_text())["name"] == "window+int4"


def test_minutes_end_a_run_with_a_report_and_the_same_command_goes_on(
    tiny_folder: Path, prose: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(out: str, *more: str) -> dict[str, Any]:
        argv = ["run", "--model", str(tiny_folder), "--text", str(prose), *SEARCH, "--json"]
        code, printed, err = call([*argv, "--out", str(tmp_path / out), *more], capsys)
        assert code == 0, err
        return strict(printed)

    looks = iter(range(1000))
    with monkeypatch.context() as m:  # time is up at the tenth look at the clock
        m.setattr("kvsearch.session.progress.time.monotonic", lambda: 6.0 * next(looks))
        found = run("stopped", "--minutes", "1")
    assert found["open"] and found["rows"] and (tmp_path / "stopped/report.html").exists()
    assert not found["interrupted"]
    (tmp_path / "stopped/report.html").unlink()  # as after a kill: the records are there
    code, printed, err = call(["report", str(tmp_path / "stopped"), "--json"], capsys)
    again = strict(printed)
    assert code == 0 and (tmp_path / "stopped/report.html").exists(), err
    assert all(again[key] == found[key] for key in ("open", "rows", "recommended"))
    assert again["seconds"] is None and "run took" not in (
        tmp_path / "stopped/report.html"
    ).read_text("utf-8")
    both = run("stopped"), run("whole")
    same = [[(r["name"], r["nll"], r["windows"]) for r in found["rows"]] for found in both]
    assert same[0] == same[1] and both[0]["open"] == ""
    assert len(found["trials"]) < len(both[0]["trials"])
    code, _, err = call(["run", "--minutes", "0"], capsys)
    assert code == 2 and "--minutes must be a number above 0, got 0" in err


def test_what_does_not_go_on_says_so_by_silence(
    tiny_folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.session.load.model", stopped)
    code, out, err = call(["eval", "full", "--model", str(tiny_folder)], capsys)
    assert (code, out, err.strip()) == (130, "", "interrupted")


def refused(*_: Any, **__: Any) -> None:
    raise KvsearchError("the cluster cannot be reached")


def test_a_start_that_is_refused_leaves_the_folder_free(
    tiny_folder: Path, prose: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    argv = ["run", "--model", str(tiny_folder), "--text", str(prose), *SEARCH, "--out", str(out),
            "--budget"]  # fmt: skip
    with monkeypatch.context() as missing:
        missing.setattr(cluster, "find_spec", lambda _: None)
        for how in (["--ray", "local"], ["--engine", "tune"]):
            code, _, err = call([*argv, "96", *how], capsys)
            assert code == 2 and "pip install 'kvsearch[ray]'" in err and not out.exists()
    with monkeypatch.context() as far:  # this shows only when the run starts
        far.setattr(evaluators, "executor", refused)
        assert call([*argv, "96"], capsys)[0] == 2 and (out / "study.json").exists()
    with monkeypatch.context() as early:
        early.setattr("kvsearch.run.run.FinalEvaluation", stopped)
        assert call([*argv, "80"], capsys)[0] == 130
    code, _, err = call([*argv, "96"], capsys)  # now there is another run
    assert code == 2 and "holds another run" in err and "budget_slots was 80.0, now 96.0" in err


def test_lora_without_peft_is_refused_before_anything_is_read(
    tiny_folder: Path, prose: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.train.recipe.find_spec", lambda _: None)
    monkeypatch.setattr("kvsearch.session.load.load_model", None)
    pruned = tmp_path / "pruned.json"
    pruned.write_text(Policy(channels=Channels(qk=("none", "all"), vo=("none", "all"))).to_json())
    for policy in ("kvpruner-01-20", str(pruned)):
        argv = ["adapt", policy, "--text", str(prose), "--steps", "2", "--out", str(tmp_path / "o")]
        code, out, err = call(argv, capsys)
        assert code == 2 and out == "" and "pip install 'kvsearch[train]'" in err
        assert err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_stdout_is_one_sentence() -> None:
    argv = [sys.executable, "-m", "kvsearch", "schema"]
    with Path("/dev/full").open("wb") as out:
        done = subprocess.run(argv, stdout=out, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "free some space" in done.stderr


@pytest.mark.parametrize(
    ("encoding", "name", "shown"),
    [
        ("cp1252", "вопрос", r"\u0432\u043e\u043f\u0440\u043e\u0441"),
        ("latin-1", "資料", r"\u8cc7\u6599"),
        ("utf-8", "half\udcff", r"half\udcff"),
        ("cp1252", "é", "é"),
    ],
)
def test_names_that_stdout_has_no_letters_for_are_printed_with_escapes(
    encoding: str, name: str, shown: str, tiny_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    policy, asked = tmp_path / f"{name}.json", tmp_path / f"{name}.jsonl"
    policy.write_text('{"slots": 40}')
    asked.write_text("\n".join(f'{{"prompt": "{"a " * 40}{i}", "answer": "b"}}' for i in "xyz"))
    for argv in (
        ["validate", policy],
        ["eval", policy, "--model", tiny_folder, "--prompts", asked],
    ):
        out = TextIOWrapper(BytesIO(), encoding=encoding)
        monkeypatch.setattr("sys.stdout", out)
        assert exit_code(*argv) == 0
        assert shown in out.buffer.getvalue().decode(encoding)


def test_a_closed_stdout_takes_nothing(
    tiny_folder: Path, prose: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", None)  # as Python has it behind `>&-`
    eval_full = ["eval", "full", "--model", tiny_folder, "--text", prose, "--context", "96"]
    assert exit_code(*eval_full) == 0


def test_losses_that_cannot_be_written(
    tiny_folder: Path, prose: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that can be known it is said first, and what was measured is printed in any case."""
    file = tmp_path / "file"
    file.write_text("")
    argv = ["eval", "full", "--model", str(tiny_folder), "--text", str(prose), "--context", "96",
            "--quiet", "--nll-out"]  # fmt: skip
    with monkeypatch.context() as unread:
        unread.setattr("kvsearch.session.load.load_model", None)
        for place in (file / "nll.parquet", tmp_path):
            code, out, err = call([*argv, str(place)], capsys)
            assert code == 2 and out == "" and f"cannot write {place}" in err
    assert list(tmp_path.iterdir()) == [file]

    def full(*_: Any) -> None:
        raise RunError("cannot write nll.parquet: the disk is full")

    monkeypatch.setattr("kvsearch.commands.evaluate.write_nll", full)
    for more in ([], ["--json"]):
        code, out, err = call([*argv, str(tmp_path / "nll.parquet"), *more], capsys)
        assert (
            code == 2
            and "full" in out
            and err == ("kvsearch: cannot write nll.parquet: the disk is full\n")
        )
    assert strict(out)["results"][0]["policy"] == "full"


def test_validate_checks_every_file_and_says_what_is_wrong_with_each(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = {
        "twice": ('{"slots": 64, "slots": 32}', "twice.json: field 'slots' is given twice"),
        "deep": ('{"slots": 64, "budgets": {"kind": "uniform", "kind": "pyramid"}}', "'kind'"),
        "words": ('{"slots": "64"}', "field slots: expected a number, got '64'"),
        "few": (
            '{"slots": 64, "interval": 64}',
            "few.json: field slots: 64 slots are fewer than the 65 that 0 sinks",
        ),
        "long": (
            '{"slots": 64, "rule": {"name": "chunks", "length": 65}}',
            "long.json: field rule.length: a chunk of 65 tokens is longer than the 64 slots",
        ),
        "none": (
            '{"slots": 64, "budgets": {"kind": "sensitivity", "weights": [[1, 0]]}}',
            "none.json: field budgets: weights must be above 0",
        ),
    }
    for name, (text, _) in wrong.items():
        Path(f"{name}.json").write_text(text)
    Path("good.json").write_text('{"slots": 65, "interval": 64, "quantizer": {"rotate": true}}')
    argv = ["validate", *(f"{name}.json" for name in wrong), "good.json"]
    code, out, err = call(argv, capsys)
    assert code == 2 and out.startswith("good.json: a valid policy, ") and out.count("\n") == 1
    assert all(said in err for _, said in wrong.values()) and err.count("kvsearch: ") == 1
    code, out, _ = call([*argv, "--json"], capsys)
    found = strict(out)
    assert code == 2 and [("error" in f, "digest" in f) for f in found[-2:]] == [
        (True, False), (False, True),
    ]  # fmt: skip
