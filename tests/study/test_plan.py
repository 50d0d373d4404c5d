"""Which runs are left, and the verdicts."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.command import call
from tests.study.toy import row_of, toy_study, tuned, with_runs
from tokamix.data import ArrayDataset, DatasetSplits
from tokamix.models import create_model
from tokamix.recipes import load_recipe
from tokamix.study.cost import EVALUATION, expected_costs, measured_seconds, network_key
from tokamix.study.networks import check_networks
from tokamix.study.page import render_dino, render_page, render_study
from tokamix.study.plan import FAILS, HOLDS, MISSING, OPEN, RUNNING, list_jobs, resolution, verdicts
from tokamix.study.rows import gpu_minutes, read_rows, write_row
from tokamix.study.run import run_study
from tokamix.study.schema import list_studies, load_study
from tokamix.train.setup.choose import choose_recipe


def verdict(study, rows):
    (only,) = verdicts(study, rows)
    return only.text


def test_tuning_comes_first_with_as_many_rates_for_each_arm() -> None:
    jobs = list_jobs(toy_study(), [])
    assert [(job.arm, job.lr_factor) for job in jobs] == [(a, f) for a in ("softmax", "sima") for f in (0.5, 1, 2)]
    assert {job.holdout for job in jobs} == {20}
    assert [job.settings["lr"] for job in jobs[:3]] == [0.005, 0.01, 0.02]


def test_the_best_rate_is_used_on_the_test_set() -> None:
    study = toy_study()
    jobs = list_jobs(study, tuned(study, best=2))
    assert [(job.arm, job.seed) for job in jobs] == [(a, 10 + i) for i in range(3) for a in ("softmax", "sima")]
    assert {(job.settings["lr"], job.holdout, job.phase) for job in jobs} == {(0.02, 0, "final")}
    assert [job.arm for job in list_jobs(study, tuned(study), only="si*")] == ["sima"] * 3
    assert {job.arm for job in list_jobs(study, tuned(study), only="si*, softmax")} == {"sima", "softmax"}


def test_a_rate_that_diverges_is_not_chosen() -> None:
    study = toy_study()
    rows = tuned(study, best=2)
    first = list_jobs(study, [])[2]
    rows = [row if row["settings_hash"] != first.settings_hash else row_of(first, None) for row in rows]
    assert list_jobs(study, rows)[0].settings["lr"] == pytest.approx(0.005)


def test_finished_runs_are_not_repeated_under_any_name() -> None:
    study = toy_study()
    rows = with_runs(study, tuned(study), softmax=[50, 51, 52])
    for row in rows:
        row["arm"] = "the name in another study"
    assert [job.arm for job in list_jobs(study, rows)] == ["sima"] * 3


def test_networks_that_cannot_be_created_are_refused(tmp_path: Path) -> None:
    """By the plan, and before the first run; arms that are not selected do not matter."""
    arms = {
        "good": {"use": ["toy"], "set": {"model": "columnar_tiny_sima"}},
        "bad": {"use": ["toy"], "set": {"model": "columnar_tiny_sima", "model_kwargs": {"dpeth": 2}}},
    }
    study = toy_study(arms=arms, claims=[])
    check_networks(study, "good")
    with pytest.raises(ValueError, match="study toy: arm bad: columnar_tiny_sima has no argument 'dpeth'"):
        run_study(study, output=tmp_path, runs=tmp_path, device="cpu", say=lambda line: None)
    file = tmp_path / "own.yaml"
    settings = {"model": "columnar_tiny_sima", "model_kwargs": {"dpeth": 2}}
    file.write_text(json.dumps({"title": "", "protocol": "", "data": {"a": "b"}, "arms": {"bad": {"set": settings}}}))
    assert "study own: arm bad: columnar_tiny_sima has no argument 'dpeth'" in call("study", file, "--plan", code=1)
    dense = {"task": "segment", "method": "semantic_fpn", "crop_size": 32, "model": "test_resnet"}
    study = toy_study(arms={"dense": {"set": {**dense, "method_kwargs": {"wdith": 8}}}}, claims=[], tune=None)
    with pytest.raises(ValueError, match="arm dense: neither semantic_fpn nor test_resnet has 'wdith'"):
        check_networks(study)


def test_the_hash_ignores_names_defaults_and_order() -> None:
    study = toy_study()
    same = toy_study(
        arms={"b": {"use": ["toy"], "set": {"hflip": 0.5, "model": "columnar_tiny_softmax", "seed": 7}}}, claims=[]
    )
    other = toy_study(arms={"b": {"use": ["toy"], "set": {"hflip": 0.4, "model": "columnar_tiny_softmax"}}}, claims=[])
    first, equal, different = (list_jobs(s, [])[0].settings_hash for s in (study, same, other))
    assert first == equal != different


def test_equal_time_scales_the_epochs() -> None:
    study, speeds = toy_study(), []
    for arm, speed in (("softmax", "100"), ("sima", "250")):
        speeds.append({"arm": arm, "mode": "train", "images_per_second": speed})
    jobs = [job for job in list_jobs(study, tuned(study), speeds) if job.arm == "time_sima"]
    assert [job.settings["epochs"] for job in jobs] == [5, 5, 5]
    assert not [job for job in list_jobs(study, tuned(study)) if job.arm == "time_sima"]


def test_seeds_are_added_only_while_the_claim_is_open() -> None:
    study = toy_study()
    rows = tuned(study)
    assert verdict(study, rows) == MISSING
    clear = with_runs(study, rows, softmax=[50.0, 50.1, 50.2], sima=[60.0, 60.1, 60.2])
    assert verdict(study, clear) == HOLDS
    assert list_jobs(study, clear) == []
    unclear = with_runs(study, rows, softmax=[50.0, 50.1, 50.2], sima=[50.1, 50.3, 50.3])
    assert verdict(study, unclear) == RUNNING
    assert [(job.arm, job.seed) for job in list_jobs(study, unclear)] == [
        *(("softmax", 13), ("sima", 13), ("softmax", 14), ("sima", 14))
    ]
    last = with_runs(study, rows, softmax=[50.0, 50.1, 50.2, 50.1, 50.0], sima=[50.1, 50.3, 50.3, 50.0, 50.1])
    assert verdict(study, last) == OPEN
    assert list_jobs(study, last) == []


def test_an_early_look_needs_more_evidence() -> None:
    """A difference with p = 0.03 after three of five seeds decides nothing, after five of five it does."""
    study = toy_study()
    scores = {"softmax": [50.0, 50.4, 50.8], "sima": [51.0, 51.4, 51.8]}
    assert verdict(study, with_runs(study, tuned(study), **scores)) == RUNNING
    single = toy_study(looks=[3])
    assert verdict(single, with_runs(single, tuned(single), **scores)) == HOLDS


def claim(**values):
    arms = values.pop("arms", {"sima": 1, "softmax": -1})
    return {"claim": "c", "source": "s", "printed": "+1", "arms": arms, **values}


@pytest.mark.parametrize(
    ("rule", "shift", "expected"),
    [
        ({"holds": {"above": 0}}, -2.0, FAILS),
        ({"holds": {"above": 0}}, 0.0, OPEN),
        ({"holds": {"above": 0}, "fails": {"below": 0.5}}, 0.0, FAILS),
        ({"holds": {"above": -0.5, "below": 0.5}}, 0.0, HOLDS),
        ({"holds": {"above": -0.5, "below": 0.5}}, 3.0, FAILS),
    ],
)
def test_rules(rule, shift: float, expected: str) -> None:
    study = toy_study(looks=[5], claims=[claim(**rule)])
    base = [50.0, 50.1, 50.2, 50.1, 50.0]
    rows = with_runs(study, tuned(study), softmax=base, sima=[x + shift for x in reversed(base)])
    assert verdict(study, rows) == expected


def test_holm_counts_every_claim() -> None:
    """p = 0.03 alone decides; among three claims, two of them not measured, it does not."""
    scores = {"softmax": [50.0, 50.4, 50.8], "sima": [51.0, 51.4, 51.8]}
    own = claim(holds={"above": 0})
    others = [claim(holds={"above": 0}, arms={"time_sima": 1, "softmax": -1})] * 2
    study = toy_study(looks=[3], claims=[own, *others])
    assert verdicts(study, with_runs(study, tuned(study), **scores))[0].text == OPEN


@pytest.mark.parametrize(("others", "looks"), [(3, [3, 6]), (1, [3, 4, 5, 6, 7, 8])])
def test_rarely_a_false_verdict(others: int, looks: list[int]) -> None:
    """At most 5 % of studies without a difference have a verdict, over all looks and claims; the limit is for 400.

    Without Holm 11 % of the first study would have one; with 5 % at each look, 13 % of the second.
    """
    arms = [f"arm{i}" for i in range(others + 1)]
    body = {"model": "columnar_tiny_softmax"}
    given = {arm: {"use": ["toy"], "set": {**body, "epochs": 2 + i}} for i, arm in enumerate(arms)}
    claims = [claim(arms={arm: 1, arms[0]: -1}, holds={"above": 0}) for arm in arms[1:]]
    study = toy_study(arms=given, claims=claims, tune=None, looks=looks)
    rows = with_runs(study, [], **{arm: [50.0] * looks[-1] for arm in arms})
    draw, false = np.random.default_rng(0), 0
    for _ in range(400):
        for row, score in zip(rows, draw.normal(60, 0.4, len(rows)), strict=True):
            row["metrics"] = json.dumps({"top1": score})
        false += any(one.text in (HOLDS, FAILS) for one in verdicts(study, rows))
    assert 1 <= false <= 400 * 0.05 + 2.6 * math.sqrt(400 * 0.05 * 0.95)


def test_single_runs_of_dino_have_the_interval_of_their_test_images() -> None:
    rows = [
        {"features": features, "mixer": mixer, "holdout": "0", "knn20": knn, "linear": linear}
        for features, mixer, knn, linear in (
            ("DINO", "sima", "77.0", "82.6"),
            ("DINO", "softmax", "78.8", "82.7"),
            ("random weights", "sima", "33.7", "82.0"),
        )
    ]
    page = render_dino(rows)
    assert "+43.3 ± 2.0 20-NN, +0.6 ± 1.7 linear" in page
    assert f"**{HOLDS}**" not in page


def test_divergence_is_a_result() -> None:
    diverges = claim(arms={"sima": 1}, holds="diverges")
    study = toy_study(claims=[diverges, claim(holds={"above": 0})])
    rows = with_runs(study, tuned(study), softmax=[50, 51, 52], sima=[None, None, None])
    assert [v.text for v in verdicts(study, rows)] == [HOLDS, OPEN]
    assert "3 diverged" in render_study(study, rows, [], rows)
    finished = with_runs(study, tuned(study), sima=[50, 51, 52])
    assert verdicts(study, finished)[0].text == FAILS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arm": {}}, r"study toy: there is no key 'arm'; did you mean arms"),
        ({"arms": {"a": {"use": ["toi"]}}}, r"arm a: there is no base 'toi'; did you mean toy"),
        ({"arms": {"a": {"set": {"epocs": 3}}}}, r"there is no key 'epocs'; did you mean epochs"),
        ({"arms": {"a": {"use": ["toy"], "seeds": 3}}}, r"arm a: there is no key 'seeds'"),
        ({"arms": {"a b": {"use": ["toy"]}}}, r"letters, digits and underscores"),
        ({"bodies": ["pyramid"]}, r"bodies has 'pyramid', but no arm is called pyramid_\*"),
        ({"looks": [3, 3]}, r"must be rising numbers of seeds"),
        ({"sizes": [8]}, r"sizes is \[8\], but must map image sides to changes"),
        ({"holdout": 0}, r"tuning needs images that are held out"),
        ({"claims": [claim(holds={"above": 0}, arms={"sima": 1})]}, r"must add up to 0"),
        ({"claims": [claim(holds={"over": 0})]}, r"must have above, below or both"),
        ({"claims": [claim(holds={"above": 0}, arms={"simma": 1, "softmax": -1})]}, r"no arm 'simma'; did you mean"),
        ({"claims": [{"claim": "c"}]}, r"the key source is missing"),
    ],
)
def test_wrong_files(changes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy_study(**changes)
    with pytest.raises(ValueError, match=r"no study 'fair_compare'; did you mean fair_comparison"):
        load_study("fair_compare")


def test_page(tmp_path) -> None:
    study = toy_study(figure="toy.png")
    rows = with_runs(study, tuned(study), softmax=[50.0, 50.1, 50.2], sima=[60.0, 60.1, 60.3])
    for row in rows:
        write_row(tmp_path / "toy.csv", row)
    page = render_page(tmp_path, [study, "fair_comparison"])
    assert (
        "| SimA is better | x | 1 | +10.03 ± 0.31 | 3 | holds if above 0, does not hold if outside | **holds** |"
        in page
    )
    assert "| `softmax` | 50.10 ± 0.25 | 3 | 2 | 1 | 0.00 M |  |" in page
    assert "12 runs, 3 minutes on a CPU; commit abc." in page
    assert f"![{study.title}](toy.png)" in page
    assert "- `fair_comparison`: " in page.partition("## Not run yet")[2]
    assert gpu_minutes(rows) == pytest.approx(12 * 30 / 2 / 60)


@pytest.mark.parametrize("name", list_studies())
def test_studies_of_the_library(name: str) -> None:
    """Every study is valid and has an estimate of its cost."""
    study = load_study(name)
    least, most = expected_costs(study, [])
    assert 0 < least.minutes <= most.minutes
    if study.order <= 6:  # the studies of the papers' claims fit one slot on a GPU
        assert most.minutes <= 25
        assert resolution(study)
    assert list_jobs(study, [])
    for arm in study.arms.values():
        if arm.settings.get("task", "classify") == "classify" and not (arm.equal_time or arm.settings.get("finetune")):
            is_body = arm.settings["model"].startswith(("columnar", "pyramid"))
            size = {"img_size": arm.settings["image_size"]} if is_body else {}
            create_model(arm.settings["model"], device="meta", **size, **arm.settings["model_kwargs"])


CHOSEN = [("default", 100, 96), ("default", 1000, 96), ("scratch", 100, 96), ("scratch", 1000, 96)]
CHOSEN += [("default", 9469, 96), ("default", 10_000, 32), ("default", 50_000, 32)]


@pytest.mark.parametrize(("arm", "count", "side"), CHOSEN)
def test_default_arms_are_what_train_chooses(arm: str, count: int, side: int) -> None:
    images = torch.zeros(1, 3, side, side, dtype=torch.uint8).expand(count, -1, -1, -1)
    part = ArrayDataset(images, [0] * count, ["a"])
    data = DatasetSplits("images", part, part, ("a",))
    choice = choose_recipe(data, None, None, False if arm == "scratch" else None, {})
    chosen = load_recipe(choice.recipe, choice.settings).to_dict()
    if choice.model:
        chosen["model"] = choice.model
    settings = dict(load_study("data_size").arms[f"{arm}_{count}"].settings)
    settings["eval_every"] = chosen["eval_every"]  # selects nothing
    assert {key: chosen[key] for key in settings} == settings


SHARED = [
    ("column_softmax", ("context_broadcasting", "softmax"), ("sima", "softmax")),
    ("column_softmax_cb", ("context_broadcasting", "cb")),
    ("column_sima", ("sima", "sima")),
    ("column_active_token", ("active_token", "axial")),
    ("column_weight_mixing", ("weight_mixing", "softmax")),
]


@pytest.mark.parametrize(("arm", "others"), [(arm, others) for arm, *others in SHARED])
def test_studies_share_their_runs(arm: str, others: list[tuple[str, str]]) -> None:
    """Arms of the same settings are trained once for all studies: tuning, seeds and further measurements."""
    fair = load_study("fair_comparison")
    rows = with_runs(fair, tuned(fair), **{arm: [50.0, 50.1, 50.2]})
    for study, name in others:
        other = load_study(study)
        (tuning,) = list_jobs(other, rows, only=name)  # the one learning rate that the comparison does not try
        assert (tuning.phase, tuning.lr_factor) == ("tune", 4)
        known = [*rows, row_of(tuning, 0.0)]
        assert [job.seed for job in list_jobs(other, known, only=name)] == list(range(13, 10 + other.looks[0]))
        assert set(other.arms[name].probes) <= set(fair.arms[arm].probes)


def test_costs_follow_measured_throughput() -> None:
    study = toy_study()
    job = list_jobs(study, [])[0]
    guessed, most = expected_costs(study, [])
    assert (guessed.runs, most.runs) == (6 + 9, 6 + 13)
    assert guessed.gpu_minutes == pytest.approx(EVALUATION * 2.0 * (9 + 6 / 2))
    assert expected_costs(study, [], processes=1)[0].minutes > guessed.minutes
    rows = tuned(study)
    assert expected_costs(study, rows)[0].runs == 9
    assert expected_costs(study, rows, only="softmax")[0].runs == 3
    for speed, runs, minutes in ((250, 3, 3 * 2.0 * 5 / 2), (101, 0, 0)):  # 5 epochs instead of 2; 2 epochs, as SimA
        speeds = [{"arm": "softmax", "mode": "train", "images_per_second": "100"}]
        speeds.append({"arm": "sima", "mode": "train", "images_per_second": str(speed)})
        cost = expected_costs(study, rows, speeds, only="time_*")[0]
        assert (cost.runs, cost.gpu_minutes) == (runs, pytest.approx(EVALUATION * minutes))
    measured = row_of(job, 50.0) | {"settings": json.dumps(job.settings), "gpu": "NVIDIA H200"}
    assert measured_seconds([measured | {"gpu": "cpu"}]) == {}
    seconds = measured_seconds([measured])  # 24 s of training in one of two processes, 120 images
    assert seconds == {network_key(job.settings): pytest.approx(24 / 2 / 120)}
    known = toy_study(data={"cifar100": "x"})
    assert expected_costs(known, [measured], only="softmax")[0].gpu_minutes == pytest.approx(
        EVALUATION * 2 * 50_000 * 0.1 / 60 * (3 + 3 / 2)
    )


def test_networks_that_ship_are_not_trained_again() -> None:
    rows = read_rows(Path(__file__).parents[2] / "results" / "studies" / "shipped.csv")
    assert len(rows) == 12
    assert list_jobs(load_study("shipped"), rows) == []


def test_runs_are_evaluated_at_most_ten_times() -> None:
    jobs = {job.arm: job.settings for job in list_jobs(load_study("recipes"), [])}
    assert jobs["small_segment"]["eval_every"] == jobs["small_segment"]["epochs"] // 10
    assert jobs["small_detect"]["eval_every"] == 4  # the recipe's, which is more than a tenth of its 36 epochs
    assert jobs["shapes_detect"]["eval_every"] == 200  # of iterations: as the recipe has it


def test_resolution_in_words() -> None:
    assert resolution(toy_study()) == ""
    assert resolution(toy_study(sigma=0.3)).startswith("5 seeds of each arm resolve a difference of 0.6 points (power")
    assert "0.6 points" in render_page("no results", [toy_study(sigma=0.3)])


def test_page_of_the_repository_is_current() -> None:
    root = Path(__file__).parents[2]
    hint = "run tokamix study --page docs/claims.md"
    assert render_page(root / "results/studies") == (root / "docs/claims.md").read_text(), hint


def test_example_of_the_guide_is_a_study(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/study.md").read_text()
    (tmp_path / "my.yaml").write_text(guide.partition("```yaml\n")[2].partition("```")[0])
    assert len(list_jobs(load_study(tmp_path / "my.yaml"), [])) == 6
