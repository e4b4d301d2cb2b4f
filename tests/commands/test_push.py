"""Shared policies: what is written, what the card says, and that it can be used from there."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from kvsearch import PolicyCache, load_model
from kvsearch.errors import PolicyError, RunError
from kvsearch.models.shared import policy_file
from kvsearch.policy import Policy
from kvsearch.results.folder import RunFolder
from kvsearch.run import summarise
from tests.command import call

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "studies" / "2026-11-outcome" / "b256"
WINDOW = Policy(slots=32, sinks=2)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.json").write_text(WINDOW.to_json(), encoding="utf-8")
    return tmp_path / "mine.json"


def test_a_run_is_shared_with_the_figures_of_its_report(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "shared"
    code, said, _ = call(["push", str(RUN), "-o", str(out)], capsys)
    assert code == 0 and "with figures of its run" in said
    best = Policy.from_json(RUN / "best.json")
    assert Policy.from_json(policy_file(str(out))).fingerprint(30) == best.fingerprint(30)
    text = (out / "README.md").read_text(encoding="utf-8")
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    measured = json.loads((out / "card.json").read_text(encoding="utf-8"))["measured"]
    rows = (RUN / "front.csv").read_text(encoding="utf-8")
    assert f"{measured['ppl']:.5f}"[:7] in rows and str(measured["bytes_peak"]) in rows
    d = measured["dnll_full"]
    assert f"{d['mean']:+.3f} [{d['lo']:+.3f}, {d['hi']:+.3f}] nats per token" in body
    assert f"{measured['bytes_peak']:,} per sequence" in body
    assert f"{measured['tokens']:,} scored tokens, not seen by the search" in body
    proofs = re.findall(r"^\| `(\w+)` .* (\w+) \|$", body, re.M)
    assert proofs == [("transformers", "nll"), ("vllm", "nll")]


def test_what_heads_lose_goes_with_a_policy_that_follows_it(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    shipped = next((ROOT / "kvsearch" / "model_analysis" / "heads").glob("*.json")).read_text(
        "utf-8"
    )
    (run / "heads.json").write_text(shipped, "utf-8")
    best = Policy.from_json(run / "best.json")
    assert best.budgets.weights
    assert call(["push", str(run), "-o", str(tmp_path / "shared")], capsys)[0] == 0
    assert (tmp_path / "shared" / "heads.json").read_text("utf-8") == shipped
    assert "--heads heads.json" in (tmp_path / "shared" / "README.md").read_text("utf-8")


ZOO, FIRST = ROOT / "docs" / "zoo", ROOT / "studies" / "2026-11-first-answer"


def test_the_zoo_says_what_its_cards_and_runs_say() -> None:
    page = (ZOO / "README.md").read_text(encoding="utf-8")
    folders = sorted(p.parent for p in ZOO.glob("*/policy.json"))
    assert {f.name for f in folders} == {f"smollm2-135m-b{n}" for n in (64, 128, 256)}
    assert page.count("](smollm2-135m-b") == len(folders)
    for folder in folders:
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
        budget = folder.name.rpartition("-")[2]
        run = FIRST / ("records/wikitext-1" if budget == "b256" else f"zoo/{budget}")
        found = summarise.read(RunFolder(run, write=False))
        best = found.row(found.recommended or "").policy
        assert Policy.from_json(policy_file(str(folder))).fingerprint(30) == best.fingerprint(30)
        m = card["measured"]
        d, e = m["dnll_full"], m["dnll_best"]
        assert (
            f"{m['bytes_peak']:,} | {m['tokens']:,} | {m['ppl']:.2f} | "
            f"{d['mean']:+.3f} [{d['lo']:+.3f}, {d['hi']:+.3f}] | "
            f"{e['mean']:+.3f} [{e['lo']:+.3f}, {e['hi']:+.3f}] ({e['best']}) |"
        ) in page
        told = f"{e['mean']:+.3f} [{e['lo']:+.3f}, {e['hi']:+.3f}] nats".replace(
            "-", "\N{MINUS SIGN}"
        )
        assert told in (folder / "README.md").read_text(encoding="utf-8")


def test_a_shared_folder_serves_a_model(mine: Path, tiny_folder: Path, capsys: Any) -> None:
    out = mine.parent / "shared"
    code, said, _ = call(["push", str(mine), "-o", str(out), "--model", str(tiny_folder)], capsys)
    assert code == 0 and "without figures" in said
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "It was not measured" in card and "base_model" not in card
    assert "| `llamacpp` |" in card and "| `openvino` |" not in card
    loaded = load_model(str(tiny_folder))
    for name in (out, out / "policy.json", str(mine)):
        assert PolicyCache.from_pretrained(name, loaded.model).policy == WINDOW
    ids = loaded.tokenizer("the lighthouse keeper", return_tensors="pt")
    cache = PolicyCache.from_pretrained(out, loaded.model)
    once = {**ids, "max_new_tokens": 30, "do_sample": False}
    own = loaded.model.generate(**once, past_key_values=cache)
    assert cache.groups[0].store.n <= 32
    # as transformers loads code from a repository, which it asks trust for in a folder, too
    custom = {"custom_generate": str(out), "trust_remote_code": True}
    cache = PolicyCache.from_pretrained(out, loaded.model)
    found = loaded.model.generate(**once, **custom, return_dict_in_generate=True)
    assert (found.sequences == own).all() and found.past_key_values.policy == WINDOW
    loaded.model.generate(**once, **custom, tokenizer=loaded.tokenizer, past_key_values=cache)
    assert cache.get_seq_length() == own.shape[1] - 1


def test_figures_that_no_run_vouches_for_are_not_passed_on(tmp_path: Path, capsys: Any) -> None:
    """The policy was edited, or converted, after its `about` was written; a run would be beside."""
    about = {"model": "smollm2-135m", "nll": 2.125, "tokens": 7680}
    (tmp_path / "mine.json").write_text(WINDOW.model_copy(update={"about": about}).to_json())
    code, _, _ = call(["push", str(tmp_path / "mine.json"), "-o", str(tmp_path / "out")], capsys)
    files = {f.name: f.read_text("utf-8") for f in (tmp_path / "out").rglob("*") if f.is_file()}
    assert code == 0 and "It was not measured" in files["README.md"]
    assert not [name for name, text in files.items() if "2.125" in text or "7680" in text]
    assert json.loads(files["card.json"])["policy"]["about"] == {"model": "smollm2-135m"}


def test_the_hub_is_asked_for_the_same_files(
    mine: Path, tiny_folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub of one folder per repository, with the client's own signatures."""
    hub = mine.parent / "hub"

    def create(self: Any, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        assert private and exist_ok
        (hub / repo_id).mkdir(parents=True, exist_ok=True)
        return f"https://hub/{repo_id}"

    def upload(self: Any, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        shutil.copytree(folder_path, hub / repo_id, dirs_exist_ok=True)

    def download(repo_id: str, filename: str, *, revision: str | None) -> str:
        if not (hub / repo_id).exists():
            raise OSError("no such repository")
        assert revision == "v1"
        return str(hub / repo_id / filename)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    code, said, _ = call(["push", str(mine), "ann/window", "--private"], capsys)
    assert code == 0 and said.startswith("https://hub/ann/window: policy.json")
    model = load_model(str(tiny_folder)).model
    assert PolicyCache.from_pretrained("ann/window", model, revision="v1").policy == WINDOW
    assert '"ann/window"' in (hub / "ann" / "window" / "README.md").read_text(encoding="utf-8")
    with pytest.raises(PolicyError, match=r"from the hub \(no such repository\)"):
        PolicyCache.from_pretrained("ann/other", model)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda *a, **k: 1 / 0)
    code, _, err = call(["push", str(mine), "ann/window"], capsys)
    assert code == 2 and "cannot be written on the hub" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["study.json", "measured.json"])
def test_a_damaged_run_is_no_run_without_figures(name: str, tmp_path: Path, capsys: Any) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(RUN, run)
    for content in ("", "{}"):
        (run / name).write_text(content)
        code, said, err = call(["push", str(run), "-o", str(out)], capsys)
        assert (code, said) == (2, "") and f"{run / name} is damaged" in err and not out.exists()
        assert len(err.splitlines()) == 1
    shutil.copy(RUN / name, run / name)
    (run / "measured.json").unlink()
    code, said, _ = call(["push", str(run), "-o", str(out)], capsys)
    assert code == 0 and "without figures: it lies in no finished run" in said


def test_mistakes_write_nothing(mine: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    for argv, part in (
        ([str(mine)], "give either a hub id"),
        ([str(mine), "ann/x", "-o", str(out)], "give either a hub id"),
        ([str(mine), "x"], "no hub id owner/name"),
        ([str(tmp_path), "-o", str(out)], "holds no policy.json"),
        ([str(tmp_path / "no.json"), "-o", str(out)], "there is no file or folder"),
    ):
        code, said, err = call(["push", *argv], capsys)
        assert (code, said) == (2, "") and part in err and not out.exists()
    call(["push", str(mine), "-o", str(out)], capsys)
    (out / "README.md").write_text("edited")
    code, _, err = call(["push", str(mine), "-o", str(out)], capsys)
    assert code == 2 and "--force" in err and (out / "README.md").read_text() == "edited"
    with pytest.raises(RunError):
        from kvsearch.commands.push import push

        push(mine)
