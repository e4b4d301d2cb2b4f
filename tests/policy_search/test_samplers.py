"""Samplers: the closed form, the model, and what every sampler promises the driver."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState
from scipy.optimize import minimize
from threadpoolctl import threadpool_info, threadpool_limits

from kvsearch import policy_space as space
from kvsearch.errors import KvsearchError
from kvsearch.policy import ModelShape
from kvsearch.policy_search import samplers
from kvsearch.policy_search.samplers import SAMPLERS, Context, Priced, make
from kvsearch.policy_search.samplers.ehvi import expected_gain
from kvsearch.policy_search.samplers.gp import GP, fit, lowest, misfit
from kvsearch.policy_search.samplers.history import History, Seen, read
from kvsearch.policy_search.samplers.kvei import Kvei
from kvsearch.policy_search.samplers.one_at_a_time import next_move
from kvsearch.policy_search.samplers.surrogate import Surrogate
from kvsearch.policy_space import Setting, Value
from kvsearch.policy_space.features import names_for
from kvsearch.policy_space.methods import METHODS
from kvsearch.results.pareto import hypervolume, log_hypervolume
from tests.heads import losses
from tests.random_policies import offset

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

SHAPE = ModelShape(layers=6, kv_heads=3, head_dim=64, heads=9)
SETTING = Setting(SHAPE, SHAPE.budget_bytes(256), 2048, heads=losses(SHAPE), offset=offset(SHAPE))
SPACE = space.load("default")
NAMES = names_for(SPACE)


def loss(point: Priced) -> float:
    """Nats per token: more slots, finer codes and a short interval help, on top of each other."""
    f = dict(zip(NAMES, point.features, strict=True))
    good = 1 - 0.2 * f["ranked"] - 0.15 * f["sensitivity"] + 0.1 * f["pyramid"] + 0.1 * f["ladder"]
    coarse = 2.0 ** (-8 * f["key bits"]) + 0.4 * 2.0 ** (-8 * f["value bits"])
    coarse *= (1 - 0.5 * f["rotate"]) * (0.5 + f["group"])
    slots = SETTING.tokens * 2 ** (7 * f["kept"] - 7)
    slots = max(16.0, slots * (1 - 0.3 * f["interval share"]))
    return 0.19 * good * (256 / slots) ** 1.1 + coarse + 0.02 * f["interval"] * f["ranked"]


def new_study(context: Context) -> optuna.Study:
    study = optuna.create_study(directions=["minimize", "minimize"])
    for method in METHODS.values():
        params = SPACE.params(method.knobs)
        if method.baseline and method.kind != "full" and params is not None:
            study.enqueue_trial(params)
    return study


def ask(study: optuna.Study, name: str, seed: int, context: Context) -> tuple[optuna.Trial, Priced]:
    """One proposal, as the driver asks: a new sampler, seeded by run and trial."""
    number = sum(t.state != TrialState.WAITING for t in study.get_trials(deepcopy=False))
    study.sampler = make(name, 10_000 * seed + number, context)
    trial = study.ask()
    point = context.look(SPACE.suggest(trial))
    return trial, point or Priced({}, "", 0, (), False)


def search(name: str, seed: int, trials: int) -> tuple[list[tuple[Priced, float]], optuna.Study]:
    """The methods and `trials` more policies; proposals that cost nothing are not counted."""
    context = Context(SPACE, SETTING)
    study, found = new_study(context), 0
    methods, done = len(study.trials), dict[str, tuple[Priced, float]]()
    while found < trials:
        trial, point = ask(study, name, seed, context)
        free = not point.feasible or point.fingerprint in done
        if trial.number >= methods:
            assert not free or name not in ("kvei", "evolutionary")
            found += not free
        if free:
            study.tell(trial, state=TrialState.PRUNED)
            continue
        done[point.fingerprint] = (point, loss(point))
        study.tell(trial, [loss(point), point.bytes_peak])
    return list(done.values()), study


def area(done: list[tuple[Priced, float]]) -> float:
    return log_hypervolume([(p.bytes_peak, d) for p, d in done], SETTING.budget_bytes or 0)


@pytest.fixture(scope="module")
def searched() -> tuple[list[tuple[Priced, float]], optuna.Study]:
    return search("kvei", 1, 40)


# -- the closed form -------------------------------------------------------------------------------


def test_expected_gain_is_the_mean_of_hypervolume_differences() -> None:
    rng = np.random.default_rng(0)
    points, reference = [(-1.0, 0.2), (-0.6, -0.4), (-0.3, -0.9), (-0.5, 0.0)], (0.3, 0.5)
    x, mean, std = (
        np.array([-1.2, -0.5, -0.1]),
        np.array([0.3, -0.5, -1.2]),
        np.array([0.3, 0.2, 0.4]),
    )
    closed = expected_gain(points, reference, x, mean, std)
    before = hypervolume(points, reference)
    for i in range(3):
        draws = rng.normal(mean[i], std[i], 6000)
        gains = [hypervolume([*points, (x[i], y)], reference) - before for y in draws]
        assert closed[i] == pytest.approx(np.mean(gains), abs=4 * np.std(gains) / 6000**0.5)


def test_a_candidate_that_is_surely_dominated_gains_nothing_and_a_sure_one_its_area() -> None:
    none = np.full(2, 1e-9)
    gain = expected_gain(
        [(0.0, 0.0)], (1.0, 1.0), np.array([0.5, 0.5]), np.array([0.1, -1.0]), none
    )
    assert gain == pytest.approx([0.0, 0.5])
    empty = expected_gain([], (1.0, 1.0), np.array([0.5, 1.5]), np.array([0.0, -9.0]), none)
    assert empty == pytest.approx([0.5, 0.0])


# -- the model -------------------------------------------------------------------------------------


def test_the_process_interpolates_reverts_and_doubts_less_where_something_runs() -> None:
    x = np.random.default_rng(0).random((40, 5))
    y = np.sin(3 * x[:, 0]) + x[:, 1] ** 2
    gp = fit(x, y)
    mean, std = gp.posterior(x)
    assert abs(mean - y).max() < 0.05 and std.max() < 0.1
    assert gp.lengths[:2].max() < gp.lengths[2:].min()  # what does not matter is smooth
    mean, std = gp.posterior(np.full((1, 5), 1e4))
    assert mean == pytest.approx([y.mean()], abs=1e-6)
    assert std == pytest.approx([gp.scale**0.5 * gp.unit], rel=1e-6)
    new = np.full((1, 5), 0.9)
    given = gp.conditioned(new)
    assert given.posterior(x)[0] == pytest.approx(gp.posterior(x)[0], abs=1e-6)
    assert given.posterior(new)[1] < 0.7 * gp.posterior(new)[1]


def test_the_fit_follows_the_slope_of_the_likelihood() -> None:
    rng = np.random.default_rng(0)
    x, z = rng.random((12, 3)), rng.normal(size=12)
    at = np.log([0.7, 1.1, 0.4, 2.0, 0.05])  # three lengths, scale, noise

    def value_and_slope(logs: np.ndarray) -> tuple[float, np.ndarray]:
        *lengths, scale, noise = np.exp(logs)
        return misfit(x, z, np.array(lengths), scale, np.full(12, noise))

    slope = value_and_slope(at)[1] * [1, 1, 1, 1, 0.05]
    steps = 1e-5 * np.eye(5)
    value = [(value_and_slope(at + s)[0], value_and_slope(at - s)[0]) for s in steps]
    assert slope == pytest.approx([(up - down) / 2e-5 for up, down in value])


@pytest.mark.parametrize("n", [6, 40])
def test_the_fit_ends_where_another_optimiser_ends(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, tuple[float, np.ndarray]] = {}

    def theirs(f: Any, x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        ours = lowest(f, x, low, high)
        best = minimize(f, x, jac=True, method="L-BFGS-B", bounds=list(zip(low, high, strict=True)))
        found["ours"], found["theirs"] = (f(ours)[0], ours), (f(best.x)[0], best.x)
        return ours

    rng = np.random.default_rng(n)
    x = rng.random((n, 8))
    monkeypatch.setattr("kvsearch.policy_search.samplers.gp.lowest", theirs)
    fit(x, x[:, 0] + np.sin(5 * x[:, 1]) + 0.1 * rng.normal(size=n))
    assert found["ours"][0] == pytest.approx(found["theirs"][0], abs=0.01)
    assert found["ours"][1] == pytest.approx(found["theirs"][1], abs=0.2)


def test_the_fit_stays_within_its_bounds() -> None:
    end = lowest(
        lambda x: (float((x - 3) @ (x - 3)), 2 * (x - 3)), np.zeros(2), -np.ones(2), np.ones(2)
    )
    assert end.tolist() == [1, 1]


def test_the_model_leaves_the_other_cores_to_the_evaluators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[set[int]] = []

    def watched(*args: np.ndarray) -> GP:
        asked.append({p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas"})
        return fit(*args)

    price, rng = Context(SPACE, SETTING).price, random.Random(0)
    found = [price(samplers.pool.anything(SPACE, rng)) for _ in range(20)]
    monkeypatch.setattr("kvsearch.policy_search.samplers.surrogate.fit", watched)
    with threadpool_limits(2, "blas"):
        Surrogate(History(done=[Seen(p, loss(p)) for p in found if p is not None]))
    assert asked == [{1}]


def test_twins_with_other_values_do_not_break_the_process() -> None:
    gp = fit(np.zeros((6, 3)), np.arange(6.0))
    assert gp.posterior(np.zeros((1, 3)))[0] == pytest.approx([2.5], abs=0.1)


def test_a_policy_that_beats_the_full_cache_raises_the_offset() -> None:
    price, rng = Context(SPACE, SETTING).price, random.Random(0)
    found = [price(samplers.pool.anything(SPACE, rng)) for _ in range(30)]
    points = [p for p in found if p is not None][:8]
    model = Surrogate(History(done=[Seen(p, -0.01 * i) for i, p in enumerate(points)]))
    assert model.heights == sorted(model.heights, reverse=True)
    assert np.isfinite(model.predict(points)[0]).all()


# -- what a sampler promises -----------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_every_sampler_keeps_the_contract(name: str) -> None:
    one, two = Context(SPACE, SETTING), Context(SPACE, SETTING)
    study = new_study(one)
    methods = len(study.trials)
    for _ in range(methods + 3):  # what is enqueued comes first, as it is
        trial, point = ask(study, name, 5, one)
        fixed = study.trials[trial.number].system_attrs.get("fixed_params")
        assert fixed is None or fixed == point.knobs
        if point.feasible:
            study.tell(trial, [loss(point), point.bytes_peak])
        else:
            study.tell(trial, state=TrialState.PRUNED)
    make(name, 9, one)  # others that were made in between change nothing
    again = []
    for context in (one, two):  # nor does what the context remembers
        study.sampler = make(name, 77, context)
        trial = study.ask()
        again.append(SPACE.suggest(trial))
        study.tell(trial, state=TrialState.FAIL)
        if name in (
            "kvei",
            "evolutionary",
            "gp",
        ):  # not what has just failed again: ask the same study
            study = _without_last(study)
    assert again[0] == again[1] and set(again[0]) <= set(SPACE.axes)


def _without_last(study: optuna.Study) -> optuna.Study:
    copy = optuna.create_study(directions=["minimize", "minimize"])
    copy.add_trials(study.trials[:-1])
    return copy


def test_an_unknown_sampler_gets_a_hint() -> None:
    with pytest.raises(KvsearchError, match="did you mean 'kvei'"):
        make("kvie", 0, Context(SPACE, SETTING))


# -- kvei ------------------------------------------------------------------------------------------


def test_the_best_policy_is_first_tried_at_the_sizes_that_are_missing() -> None:
    context, history = Context(SPACE, SETTING), History()
    wide: dict[str, Value] = {
        "rule": "h2o", "tiers": "k4v4", "recent_window": 64, "sinks": 4, "interval": 16,
        "offset": "none",
    }  # fmt: skip
    for dnll, score in ((0.1, "h2o"), (0.2, "tova")):
        draw = samplers.pool.Draw({**wide, "rule": score, "budget_fraction": 1.0}, random.Random(0))
        point = context.price(SPACE.suggest(draw))
        assert point is not None
        history.done.append(Seen(point, dnll))
    sizes = []
    while (knobs := samplers.size_probes.size_probe(history, context)) is not None:
        sizes.append(knobs["budget_fraction"])
        assert {**knobs, "budget_fraction": 1.0} == history.done[0].point.knobs
        point = context.price(knobs)
        assert point is not None
        history.pending.append(point)
    assert sizes == [0.75, 0.55, 0.4]


def test_every_axis_is_moved_once_on_the_best_policy_of_its_time() -> None:
    context, rng, history, moved = Context(SPACE, SETTING), random.Random(1), History(), []

    def tell(knobs: Mapping[str, Value]) -> None:
        point = context.look(knobs)
        assert point is not None
        dnll = 0.1 + (knobs["tiers"] != "k4v4") - 0.05 * (knobs["budgets"] == "heads")
        history.done.append(Seen(point, dnll))
        history.tried.add(point.fingerprint)

    for name in ("xmu+int4", "window+int4", "h2o+int4"):
        tell(SPACE.params(METHODS[name].knobs) or {})
    while (size := samplers.size_probes.size_probe(history, context)) is not None:
        tell(size)
    while (knobs := next_move(history, context, Surrogate(history))) is not None:
        assert Kvei(1, context).propose(history, rng) == knobs, "before it asks its model"
        base = history.best()[0].point.knobs
        changed = [k for k in SPACE.axes if knobs.get(k) != base.get(k)]
        moved.append(changed[0])
        assert all(moved[-1] in SPACE.axes[k].when for k in changed[1:]), "one move"
        tell(knobs)
    assert len(set(moved)) == len(moved), "and none twice"
    assert {"rotate", "levels", "budgets", "interval", "tiers"} <= set(moved)
    assert moved.index("exponent") > moved.index("budgets"), "which opened it"
    assert not {"rule", "budget_fraction"} & set(moved), (
        "the methods have shown one, sizes are another step"
    )


def test_policies_that_are_both_under_way_have_not_moved_an_axis() -> None:
    context, moved = Context(SPACE, SETTING), dict[bool, set[str]]()

    def priced(knobs: Mapping[str, Value]) -> Priced:
        point = context.price(knobs)
        assert point is not None
        return point

    for whole in (False, True):
        first, *others = (
            priced(SPACE.params(METHODS[name].knobs) or {})
            for name in ("window+int4", "snapkv", "pyramidkv")
        )
        history = History(done=[Seen(first, 0.1)])
        if whole:
            history.done.append(Seen(others.pop(0), 0.3))
        history.pending = list(others)
        moves = set[str]()
        while (knobs := next_move(history, context, Surrogate(history))) is not None:
            moves |= {k for k in SPACE.axes if knobs.get(k) != first.knobs.get(k)}
            point = priced(knobs)
            history.done.append(Seen(point, 0.2))
            history.tried.add(point.fingerprint)
        moved[whole] = moves
    assert "budgets" in moved[False] and "budgets" not in moved[True]


def test_proposals_are_feasible_and_new(
    searched: tuple[list[tuple[Priced, float]], optuna.Study],
) -> None:
    done = searched[0]  # `search` itself fails on a proposal that is not
    assert len({p.fingerprint for p, _ in done}) == len(done)
    assert all(p.bytes_peak <= (SETTING.budget_bytes or 0) for p, _ in done)
    breeders, _ = search("evolutionary", 1, 20)
    assert len({p.fingerprint for p, _ in breeders}) == len(breeders)


def test_forty_proposals_beat_eighty_random_ones(
    searched: tuple[list[tuple[Priced, float]], optuna.Study],
) -> None:
    others = [area(search("random", seed, 80)[0]) for seed in (1, 2, 3)]
    assert area(searched[0]) > max(others)


def test_pending_proposals_differ_even_under_one_seed(
    searched: tuple[list[tuple[Priced, float]], optuna.Study],
) -> None:
    context, study = Context(SPACE, SETTING), searched[1]
    asked = []
    for _ in range(3):
        study.sampler = make("kvei", 4, context)
        point = context.price(SPACE.suggest(study.ask()))
        assert point is not None
        asked.append(point)
    assert len({p.fingerprint for p in asked}) == 3
    history = read(study.trials, context, -1)
    assert [p.fingerprint for p in history.pending] == [p.fingerprint for p in asked]
    model = Surrogate(history)
    alone = Surrogate(read(study.trials[:-3], context, -1))
    assert (model.fitted.lengths == alone.fitted.lengths).all()  # nothing is fitted on them
    assert (model.predict(asked)[1] < alone.predict(asked)[1]).all()


def test_importances_name_the_axes_that_matter(
    searched: tuple[list[tuple[Priced, float]], optuna.Study],
) -> None:
    kvei = Kvei(0, Context(SPACE, SETTING))
    shares = kvei.importances(searched[1])
    assert sum(shares.values()) == pytest.approx(1) and set(shares) == set(SPACE.axes)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert shares["tiers"] > 4 * shares["positions"]
    assert kvei.importances(optuna.create_study(directions=["minimize"] * 2)) == {}


def test_with_speed_as_an_objective_proposals_spread_over_speeds(
    searched: tuple[list[tuple[Priced, float]], optuna.Study],
) -> None:
    context = Context(SPACE, SETTING, lambda policy: 0.5 if policy.quantizes else 2.0)
    study = optuna.create_study(directions=["minimize", "minimize", "maximize"])
    for trial in searched[1].trials:
        if trial.state == TrialState.COMPLETE:
            point = context.look(trial.params)
            assert point is not None
            values = [*trial.values, point.speed]
            study.add_trial(
                optuna.trial.create_trial(
                    params=trial.params, distributions=trial.distributions, values=values
                )
            )
    speeds = []
    for seed in range(12):
        study.sampler = make("kvei", seed, context)
        trial = study.ask()
        point = context.price(SPACE.suggest(trial))
        assert point is not None
        speeds.append(point.speed)
        study.tell(trial, state=TrialState.PRUNED)
    assert set(speeds) == {0.5, 2.0}


@pytest.mark.parametrize(
    "last",
    [
        {"state": TrialState.PRUNED, "constraints": {"fits": 1.0}},
        {"values": [3.0, -3.0]},  # a policy that is there already, measured again
        {"state": TrialState.PRUNED},  # a point that is there already, stopped again
    ],
)
def test_the_gp_of_optuna_does_not_repeat_itself(last: dict[str, Any]) -> None:
    study = optuna.create_study(directions=["minimize", "minimize"])
    sampler = make("gp", 1, Context(SPACE, SETTING))
    flag = {"x": optuna.distributions.CategoricalDistribution((0, 1))}
    for i in range(12):
        values = [float(i), float(-i)]
        study.add_trial(optuna.create_trial(params={"x": i % 2}, distributions=flag, values=values))
    assert "x" in sampler.infer_relative_search_space(study, study.ask())
    study.add_trial(optuna.create_trial(params={"x": 0}, distributions=flag, **last))
    assert sampler.infer_relative_search_space(study, study.ask()) == {}


def test_rules_and_formats_outside_the_space_do_not_widen_the_process() -> None:
    assert len(NAMES) == 31 and not {"key norm", "lag", "along tokens"} & set(NAMES)
    axes = {**SPACE.axes, "rule": space.Axis(choice=("none", "key-norm"))}
    wider = names_for(SPACE.model_copy(update={"axes": axes}))
    assert "key norm" in wider and "pooled" not in wider


def test_the_expected_gain_is_of_losses_that_can_still_be_saved() -> None:
    """A tenth of all losses leaves less to save, and a best policy that is lucky is no gain."""
    context, (_, study) = Context(SPACE, SETTING), search("random", 0, 6)
    model = Kvei(0, context)

    def told(scale: float, count: int | None = None) -> float:
        made = optuna.create_study(directions=["minimize", "minimize"])
        for t in study.get_trials(deepcopy=False)[:count]:
            values = None if t.values is None else [scale * t.values[0], t.values[1]]
            made.add_trial(
                optuna.trial.create_trial(
                    state=t.state, values=values, params=t.params, distributions=t.distributions
                )
            )
        return model.expected_gain(made)

    assert told(1.0, 3) == float("inf")  # too few for a model
    whole, small = told(1.0), told(0.1)
    assert 0 < small < 0.5 * whole < 0.5
