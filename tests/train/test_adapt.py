"""`kvsearch adapt`: the mask of training is the evaluator's, and a killed training goes on."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvsearch import Policy, Text, load_model
from kvsearch.cache.by_age import plans
from kvsearch.commands import adapt_job
from kvsearch.commands.adapt import adapt
from kvsearch.errors import KvsearchError, PolicyError, RunError
from kvsearch.evaluation.evaluator import Evaluator, stepwise
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Anchors, Channels
from kvsearch.policy_space.methods import at
from kvsearch.rules import Attention
from kvsearch.train.loop import _collate
from kvsearch.train.new_token import with_new_token
from kvsearch.train.scheduled import IGNORED, Scheduled
from kvsearch.train.work import Work
from tests.cache.test_anchors import BY_AGE
from tests.cache.test_anchors import IDS as ANCHORED
from tests.cache.test_anchors import PROMPT as ANCHORED_PROMPT
from tests.cache_cases import EXTRA, IDS, PROMPT, SETTING, tiny
from tests.command import exit_code

WORDS = "The cat sat on the mat. It was a warm day, and nothing moved! Who knows why? Dogs do. "
TEXT = Text(WORDS * 60, "cats")
AC = Policy(name="ac", sinks=1, anchors=Anchors(at="sentences", insert=True))
AFTER = Policy(slots=PROMPT + 8, interval=4, sinks=2, trigger="prompt+stream")

NAMES = ("full", "streamingllm", "lacache", "int4", "kivi2", "window+int4")
ALL = {name: at(name, SETTING) for name in NAMES} | EXTRA | BY_AGE | {"after a prompt": AFTER}
POLICIES = {name: policy for name, policy in ALL.items() if plans.applies(policy)}


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    return tiny(dtype=torch.float32)


@pytest.fixture(scope="module")
def exact() -> LoadedModel:
    return tiny()


def text_of(policy: Policy) -> tuple[np.ndarray, int]:
    """Windows and prompt."""
    if policy.anchors is not None:
        return ANCHORED, ANCHORED_PROMPT if policy.after_prompt else 0
    return IDS, PROMPT if policy.after_prompt else 0


def gradients(under: Scheduled, ids: np.ndarray) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of the mean."""
    model, batch = under.loaded.model, _collate(under.examples(ids))
    model.requires_grad_(True)
    try:
        loss = under.loss(model, batch) / (batch["labels"] != IGNORED).sum()
        gone = under.policy.channels is not None  # weights of such channels have no gradient
        weights = list(model.parameters())
        found = torch.autograd.grad(loss, weights, materialize_grads=gone)
    finally:
        model.requires_grad_(False)
    return loss.item(), [g.detach() for g in found]


@pytest.mark.parametrize("name", POLICIES)
def test_the_loss_of_training_is_that_of_the_replay(name: str, small: LoadedModel) -> None:
    policy = POLICIES[name]
    if policy.quantizer.group == 32:  # their heads are of that size
        small = tiny(dtype=torch.float32, head_dim=32)
    ids, prompt = text_of(policy)
    loss, _ = gradients(Scheduled(policy, small, prompt=prompt), ids)
    nll = Evaluator(small, batch=2).quality(policy, ids, prompt=prompt, resident=False).nll
    assert abs(loss - nll[:, max(1, prompt) - 1 :].mean()) < 1e-4
    full = Evaluator(small).quality(Policy(), ids, resident=False).nll
    assert not policy.compacts or np.abs(nll - full).max() > 0.01


@pytest.mark.parametrize("name", [n for n, p in POLICIES.items() if not p.quantizes])
def test_gradients_are_slopes(name: str, exact: LoadedModel) -> None:
    """Uphill in every weight, by random amounts, against the evaluator's own losses."""
    policy = POLICIES[name]
    ids, prompt = text_of(policy)
    weights, gen = list(exact.model.parameters()), torch.Generator().manual_seed(0)
    found = gradients(Scheduled(policy, exact, prompt=prompt, native=torch.float64), ids)[1]
    way = [torch.rand(g.shape, generator=gen, dtype=g.dtype) * g.sign() for g in found]
    ends = []
    for by in (1e-6, -2e-6):  # there, and to the other side
        for w, d in zip(weights, way, strict=True):
            w.add_(by * d)
        quality = Evaluator(exact, batch=2).quality(
            policy, ids, prompt=prompt, resident=False, native=torch.float64
        )
        ends.append(quality.nll[:, max(1, prompt) - 1 :].astype(np.float64).mean())
    for w, d in zip(weights, way, strict=True):
        w.add_(1e-6 * d)
    slope = sum(float((g * d).sum()) for g, d in zip(found, way, strict=True))
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-3)


def test_a_gradient_is_not_rounded_to_16_bits(small: LoadedModel) -> None:
    """Keys and values are fp16 numbers; gradients of a mean over tokens may be below those."""
    policy = Policy(slots=32, sinks=4)
    one, other = (
        gradients(Scheduled(policy, small, native=kind), IDS)[1]
        for kind in (torch.float32, torch.float16)
    )
    for a, b in zip(one, other, strict=True):
        assert (a - b).norm() < 0.01 * a.norm()


def test_inserted_anchors_are_fed_and_not_predicted(tiny_folder: Path) -> None:
    """A checkpoint with the new token says what the policy said before there was one."""
    loaded = load_model(str(tiny_folder), device="cpu", announce=lambda _: None)
    ids = np.array([loaded.tokenizer(WORDS)["input_ids"]])
    before = Evaluator(loaded).quality(AC, ids).nll
    made = with_new_token(loaded, AC)
    new = made.silent
    assert loaded.silent is None and new == 257 == made.model.config.vocab_size - 1
    assert made.model.generation_config.suppress_tokens == [new]
    np.testing.assert_allclose(Evaluator(made).quality(AC, ids).nll, before, atol=1e-6)
    under = Scheduled(AC, made)
    (example,) = under.examples(ids)
    fed, labels = example["input_ids"], example["labels"]
    assert (fed == new).sum() == 3 and (labels[fed == new] == IGNORED).all()
    own = fed != new
    assert fed[own].tolist() == ids[0].tolist() == [ids[0, 0], *labels[own][1:].tolist()]
    loss, found = gradients(under, ids)
    assert loss == pytest.approx(before.mean(), abs=1e-4)
    names = [name for name, _ in made.model.named_parameters()]
    rows = dict(zip(names, found, strict=True))
    assert rows["model.embed_tokens.weight"][new].any()
    assert not rows["lm_head.weight"][new].any()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "cats.txt").write_text(TEXT.text)
    (tmp_path / "ac.json").write_text(AC.to_json())
    return tmp_path


FAST = ("--context", "96", "--accumulate", "2", "--lr", "3e-3", "--warmup", "2", "--quiet")


@pytest.mark.parametrize("lora", ["--lora", "--no-lora"])
def test_twenty_steps_and_eval_needs_nothing_else(
    lora: str, tiny_folder: Path, files: Path, capsys
) -> None:
    out, text = files / "out", files / "cats.txt"
    asked = ["adapt", files / "ac.json", "--model", tiny_folder, "--text", text, "--out", out]
    assert exit_code(*asked, *FAST, "--steps", "20", lora, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["steps"] == 20 and said["gain"]["hi"] < -0.02
    assert said["gain"]["mean"] == pytest.approx(said["after"] - said["before"], abs=1e-6)
    losses = np.genfromtxt(out / "losses.csv", delimiter=",", names=True)
    assert losses["step"].tolist() == [*range(1, 21)] and losses["loss"][-1] < losses["loss"][0]
    plain = AutoModelForCausalLM.from_pretrained(out)
    assert type(plain).__name__ == "LlamaForCausalLM" and plain.config.use_cache
    kept = AutoTokenizer.from_pretrained(out)
    assert kept.convert_tokens_to_ids("<AC>") == 257
    assert not (files / "out.training").exists()
    begun = load_model(str(tiny_folder), device="cpu", announce=lambda _: None).model
    moved = plain.model.embed_tokens.weight[:257] - begun.model.embed_tokens.weight
    assert moved.any() == (lora == "--no-lora")
    (stop,) = kept(".")["input_ids"]
    new, copied = plain.model.embed_tokens.weight[257], begun.model.embed_tokens.weight[stop]
    assert (new - copied).abs().max() > 1e-3
    policy = out / "policy.json"
    more = ("--context", "200", "--json", "--quiet", "--text", text)
    assert exit_code("eval", policy, "--model", out, *more) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    again = load_model(str(out), device="cpu", announce=lambda _: None)
    ids = again.tokenizer(TEXT.text)["input_ids"][:200]
    slow = stepwise(again, Policy.from_json(policy), np.array([ids]))[0]
    once = Evaluator(again).quality(Policy.from_json(policy), np.array([ids])).nll
    assert np.abs(slow - once).max() < 1e-3 and np.isfinite(row["nll"])


def test_channels_are_pruned_then_recovered(tiny_folder: Path, tmp_path: Path) -> None:
    word = "5 a"  # two of four pairs in either head
    about = {"model": "tiny", "nll": 2.5}
    channels = Channels(qk=(word, "all"))
    policy = Policy(slots=40, interval=8, sinks=2, channels=channels, about=about)
    out, how = tmp_path / "small", dict(steps=8, lr=3e-3, warmup=1, accumulate=2)
    more = dict(context=96, **how, progress=False)
    done = adapt(policy, str(tiny_folder), TEXT, out, **more)
    assert done.trained == "LoRA of rank 8" and done.gain.hi < 0
    left = Policy.from_json(out / "policy.json")
    assert not left.channels.active and left.slots == 40
    assert left.about["channels"]["qk"] == [word, "all"]
    assert {*left.about} == {"model", "adapted", "channels"}  # the loss was another model's
    small = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert small.model.layers[0].self_attn.k_proj.weight.shape == (8, 32)  # of 16
    assert not any("lora" in name for name, _ in small.named_parameters())
    # a policy by score, on what is left: the channels alone
    scored = left.model_copy(update={"rule": Attention(), "name": "scored"})
    both = Policy(rule=Attention(), slots=40, channels=policy.channels, name="both")
    with pytest.raises(PolicyError, match=r"its rule 'attention' ranks .* with --channels-only"):
        adapt(both, str(tiny_folder), TEXT, tmp_path / "other", **more)
    only = adapt(scored, str(out), TEXT, tmp_path / "other", channels_only=True, **more)
    assert only.full_before == pytest.approx(done.full_after, abs=1e-5)
    assert Policy.from_json(tmp_path / "other" / "policy.json").scored


def test_a_model_in_memory_stays_as_it_is(tiny_folder: Path, tmp_path: Path) -> None:
    loaded = load_model(str(tiny_folder), device="cpu", announce=lambda _: None)
    mine = LoadedModel.of(loaded.model, loaded.tokenizer)
    how = dict(steps=3, lr=1e-2, warmup=0, accumulate=1)
    adapt(AC, mine, TEXT, tmp_path / "out", context=96, **how, progress=False)
    again = LoadedModel.of(loaded.model, loaded.tokenizer)
    assert again.digest == mine.digest and mine.silent is None


# -- interruptions -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_losses(
    tiny_folder: Path, files: Path, capsys
) -> None:
    """Of all weights; `test_a_damaged_checkpoint_is_not_gone_on_from` goes on with LoRA."""
    asked = ["adapt", "streamingllm", "--budget", "32", "--model", tiny_folder, "--no-lora",
             "--text", files / "cats.txt", *FAST, "--save-every", "3"]  # fmt: skip
    assert exit_code(*asked, "--steps", "10", "--out", files / "whole") == 0
    out, work = files / "out", files / "out.training"
    command = [sys.executable, "-m", "kvsearch", *map(str, asked), "--steps", "100000"]
    child = subprocess.Popen([*command, "--out", str(out)])
    try:
        end = time.monotonic() + 300
        while not any(work.glob("checkpoints/checkpoint-*/whole.json")):
            assert child.poll() is None and time.monotonic() < end
            time.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert not out.exists()
    last = max(int(f.parent.name.split("-")[1]) for f in work.glob("checkpoints/*/whole.json"))
    torn = work / "checkpoints" / f"checkpoint-{last + 3}"  # as a kill while saving leaves it
    torn.mkdir(exist_ok=True)
    (torn / "trainer_state.json").write_text("{")
    assert exit_code(*asked, "--steps", str(max(10, last + 2)), "--out", out) == 0
    assert not work.exists()
    one, other = (
        np.genfromtxt(folder / "losses.csv", delimiter=",", names=True)
        for folder in (files / "whole", out)
    )
    assert len(other) == max(10, last + 2)
    for name in ("step", "loss", "grad_norm", "learning_rate"):
        np.testing.assert_allclose(one[name], other[name][:10], rtol=1e-6)


def test_an_end_that_is_interrupted_is_not_trained_again(
    tiny_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    out = tmp_path / "out"
    how = dict(steps=6, lr=3e-3, warmup=1, accumulate=2)
    asked = (AC, str(tiny_folder), TEXT, out)
    with monkeypatch.context() as patch:
        patch.setattr(adapt_job, "write_nll", lambda *_: sys.exit(9))
        with pytest.raises(SystemExit):
            adapt(*asked, context=96, **how, progress=False)
    assert [f.name for f in tmp_path.iterdir()] == ["out.training"]
    with pytest.raises(RunError, match=r"with another --lr; give another --out"):
        adapt(*asked, context=96, steps=6, accumulate=2, warmup=1, progress=False)
    monkeypatch.setattr(Scheduled, "loss", None)  # no step is left
    done = adapt(*asked, context=96, **how, progress=False)
    assert done.steps == 6 and done.gain.hi < 0 and [f.name for f in tmp_path.iterdir()] == ["out"]


def test_a_damaged_checkpoint_is_not_gone_on_from(
    tiny_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    def trained(out: Path, steps: int) -> str:
        how = dict(steps=steps, lr=3e-3, warmup=1, accumulate=1, save_every=2)
        adapt(AC, str(tiny_folder), TEXT, out, context=96, **how, progress=False)
        return (out / "losses.csv").read_text()

    want = trained(tmp_path / "whole", 8)
    with monkeypatch.context() as patch:
        patch.setattr(adapt_job, "write_nll", lambda *_: sys.exit(9))
        with pytest.raises(SystemExit):
            trained(tmp_path / "begun", 6)
    newest = Path("checkpoints/checkpoint-6")
    damaged = ("model.safetensors", "cut"), ("trainer_state.json", "gone"), ("whole.json", "empty")
    for number, (name, damage) in enumerate(damaged):
        out = tmp_path / str(number)
        work = out.with_name(f"{number}.training")
        shutil.copytree(tmp_path / "begun.training", work)
        file = work / newest / name
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[: 9 if damage == "cut" else 0])
        assert trained(out, 8) == want, (name, damage)
    work = tmp_path / "last.training"
    shutil.copytree(tmp_path / "begun.training", work)
    file = work / newest / "optimizer.pt"
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(RunError, match=r"checkpoint-6 is damaged .*; remove it and run the same"):
        trained(tmp_path / "last", 8)
    shutil.rmtree(work / newest)
    assert trained(tmp_path / "last", 8) == want


def test_a_checkpoint_is_on_the_disk_before_its_mark(tmp_path: Path, monkeypatch) -> None:
    synced, usual = list[str](), os.fsync
    for asked in {"--lr": 1e-3}, {"--lr": 2e-3}:  # killed before the first one: another question
        work = Work(tmp_path / "out")
        work.claim(asked)
        work._lock.release()
    place = work.checkpoints / "checkpoint-3"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(b"weights")

    def fsync(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        usual(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    work.mark(3, 9.0)
    mark = next(name for name in synced if name.startswith(".whole.json"))
    assert synced.index("model.safetensors") < synced.index("checkpoint-3") < synced.index(mark)
    assert work.last() is not None
    work.claim(asked)
    with pytest.raises(RunError, match="unfinished training with another --lr"):
        work.claim({"--lr": 1e-3})
    work.close(done=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("policy", "limit"),
    [
        (Policy(slots=32), 100_000),  # less than the weights
        (Policy(slots=32), 200_000),  # less than the optimizer's numbers
        (Policy(slots=32, channels=Channels(qk=("5 a", "all"))), 60_000),  # less than what is left
    ],
    ids=["weights", "optimizer", "pruned"],
)
def test_a_full_disk_is_one_sentence_and_the_same_call_goes_on(
    policy: Policy, limit: int, tiny_folder: Path, tmp_path: Path
) -> None:
    asked = (policy, str(tiny_folder), TEXT, tmp_path / "out")
    how = dict(context=96, steps=2, accumulate=1, lora=False, progress=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(RunError, match=r"cannot write .* free some space"):
            adapt(*asked, **how)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "out").exists()
    assert adapt(*asked, **how).steps == 2


def test_minutes_are_a_limit(tiny_folder: Path, tmp_path: Path) -> None:
    how = dict(minutes=0.02, accumulate=1, warmup=1)
    done = adapt(
        Policy(slots=32), str(tiny_folder), TEXT, tmp_path / "out",
        context=96, **how, progress=False,
    )  # fmt: skip
    assert done.steps >= 1 and 1.2 <= done.seconds < 20


# -- mistakes ----------------------------------------------------------------------------------


def test_mistakes_are_one_sentence_and_leave_nothing(
    tiny_folder: Path, files: Path, capsys
) -> None:
    (files / "there").mkdir()
    (files / "scored.json").write_text(Policy(slots=32, rule=Attention()).to_json())
    (files / "short.txt").write_text(WORDS)
    before = {*files.iterdir()}
    ac, text, out = files / "ac.json", ("--text", files / "cats.txt"), ("--out", files / "new")
    cases = (
        (
            (files / "scored.json", *text, *out),
            "cannot train under policy scored: its rule",
        ),
        (("h2o", "--budget", "64", *text, *out), "cannot train under policy h2o: "),
        ((ac, *text, "--out", files / "there"), "exists already; choose another folder"),
        ((ac, "--text", files / "short.txt", *out), "give a longer text"),
        ((ac, *text, *out, "--held-out", files / "cats.txt"), "is the text that is trained on"),
        ((ac, *text, *out, "--steps", "0"), "--steps must be at least 1"),
        ((ac, *text, *out, "--seed", "-1"), "--seed must be at least 0 and below 2^32"),
        ((ac, *text, *out, "--minutes", "0"), "--minutes must be above 0"),
        ((ac, *text, *out, "--minutes", "inf"), "--minutes must be above 0 and finite"),
        ((ac, *text, *out, "--channels-only"), "--channels-only is for a policy"),
        ((ac, *text, *out, "--dtype", "float16"), "--dtype float32 or bfloat16"),
        ((ac, *text, *out, "--device", "cpu,cpu"), "takes the CPU or the first GPU, not cpu,cpu"),
    )
    for args, said in cases:
        code = exit_code("adapt", *args, "--model", tiny_folder, "--quiet")
        err = capsys.readouterr().err
        assert code == 2 and said in err and err.count("\n") == 1, err
    assert {*files.iterdir()} == before


def test_a_loss_that_is_not_finite_stops_training(
    tiny_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    def burst(self, model, batch):
        return sum(p.sum() for p in model.parameters()) * float("inf")

    monkeypatch.setattr(Scheduled, "loss", burst)
    asked = (Policy(slots=32), str(tiny_folder), TEXT, tmp_path / "out")
    with pytest.raises(KvsearchError, match=r"the loss of step 1 is not finite; lower --lr"):
        adapt(*asked, context=96, progress=False)
    assert not (tmp_path / "out").exists()
