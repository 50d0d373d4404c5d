"""Running a study: rows, resuming, failures, the deadline; the worker, the data, the command."""

import importlib
import json
import math
import re
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from safetensors.torch import load_file

from tests.command import call
from tests.study.toy import row_of, toy_study, tuned, with_runs
from tests.train.tiny import tiny_data
from tokamix.models import create_body
from tokamix.recipes import create_recipe
from tokamix.study import run as run_module
from tokamix.study import worker
from tokamix.study.data import decode_once, draw_balanced, load_splits
from tokamix.study.figure import draw_figure
from tokamix.study.plan import final_job, list_jobs
from tokamix.study.processes import Process, environment
from tokamix.study.rows import SPEED_COLUMNS, key_of, read_all_rows, read_rows, unpack_bits, write_row
from tokamix.study.run import next_job, run_study, threads_of_run
from tokamix.study.schema import Study, load_study
from tokamix.study.speed import prepare
from tokamix.study.worker import train_job, work
from tokamix.train.output.lock import LockedError, lock_folder
from tokamix.train.tasks.classify import Classify

RESULTS = Path(__file__).parents[2] / "results" / "studies"
WORKER = """
import json, os, sys, time
for number, line in enumerate(iter(sys.stdin.readline, "")):
    job = json.loads(open(line.strip()).read())
    if job["arm"] == "sima" and "sima fails" in job["source"]:
        sys.exit("no such kernel")
    if number and "second runs fail" in job["source"]:
        sys.exit("out of memory")
    if job["arm"] == "sima" and "sima waits" in job["source"]:
        time.sleep(60)
    score = 50 + job["seed"] / 10 + (job["arm"] == "sima")
    row = {"status": "finished", "score": score, "metrics": json.dumps({"top1": score}), "seconds": 1.0}
    row |= {"images_per_second": 9.0, "train_seconds": 1.0, "settings": json.dumps(job["settings"]), "epochs": 2}
    row["torch"] = str(os.getpid())
    row["correct"] = "gA=="
    open(job["result"] + ".part", "w").write(json.dumps(row))
    os.rename(job["result"] + ".part", job["result"])
"""


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end at once, in real processes; the data is its own name."""
    monkeypatch.setattr(run_module, "decode_once", lambda source, task, folder: source)

    def start(module: str, arguments: list[str], log: Path, runs: Path, mps: bool, threads: int | None) -> Process:
        with log.open("wb") as file:
            command = [sys.executable, "-S", "-c", WORKER, *arguments]
            return Process(command, stdin=PIPE, stdout=file, stderr=file, start_new_session=True)

    monkeypatch.setattr(run_module, "start_process", start)


def run(folder: Path, source: str = "x", lines: list[str] | None = None, **options) -> list[str]:
    lines = [] if lines is None else lines
    study = toy_study(looks=[3])
    run_study(study, {"stripes": source}, folder / "out", folder / "runs", device="cpu", say=lines.append, **options)
    return lines


def test_every_run_is_a_row_and_none_is_repeated(tmp_path: Path, fake_worker: None) -> None:
    lines = run(tmp_path, jobs=3)
    rows = read_rows(tmp_path / "out/toy.csv")
    assert len(rows) == 6 + 6
    assert [row["phase"] for row in rows].count("tune") == 6
    final = {(row["arm"], row["seed"]) for row in rows if row["phase"] == "final"}
    assert final == {(a, str(10 + i)) for a in ("sima", "softmax") for i in range(3)}
    assert {row["processes"] for row in rows} == {"3"}
    assert any(line.startswith("final sima 12: 52.20 % in 1 s") for line in lines)
    assert all(create_recipe(json.loads(row["settings"])) for row in rows)
    run(tmp_path)
    assert read_rows(tmp_path / "out/toy.csv") == rows
    bits = read_rows(tmp_path / "out/toy_correct.csv")
    assert [(row["seed"], row["settings_hash"]) for row in bits] == [
        (row["seed"], row["settings_hash"]) for row in rows
    ]
    assert unpack_bits(bits[0]["correct"], 3).tolist() == [True, False, False]
    assert len(read_all_rows(tmp_path / "out", "another")) == len(rows)


def test_several_studies_share_the_device_and_equal_runs(tmp_path: Path, fake_worker: None) -> None:
    toy, lines = toy_study(looks=[3]), []
    arms = {name: toy.arms[name] for name in ("softmax", "sima")}
    probed = replace(toy, name="probed", arms=arms | {"softmax": replace(arms["softmax"], probes=("fgsm",))})
    other = replace(toy, name="other", arms={"alone": replace(arms["sima"], name="alone", tuned=False)}, claims=())
    options = {"device": "cpu", "jobs": 3, "say": lines.append}
    run_study([toy, probed, other], {"stripes": "x"}, tmp_path / "out", tmp_path / "runs", **options)
    assert lines[0] == "toy, probed, other: 3 runs at a time"
    assert len(read_rows(tmp_path / "out/toy.csv")) == 12
    assert not (tmp_path / "out/probed.csv").exists()  # all its runs are those of toy
    assert {row["arm"] for row in read_rows(tmp_path / "out/other.csv")} == {"alone"}
    finals = [json.loads(path.read_text()) for path in (tmp_path / "runs/results").glob("softmax_1*.job")]
    assert [job["probes"] for job in finals] == [["fgsm"]] * 3


def test_a_failed_run_has_no_row_and_is_tried_again_next_time(tmp_path: Path, fake_worker: None) -> None:
    lines: list[str] = []
    with pytest.raises(ChildProcessError, match=r"3 runs failed, see the logs in .*results; the same command repeats"):
        run(tmp_path, "sima fails", jobs=2, lines=lines)
    assert {row["arm"] for row in read_rows(tmp_path / "out/toy.csv")} == {"softmax"}
    assert sum("no such kernel" in line and "FAILED sima" in line for line in lines) == 3
    run(tmp_path, jobs=4)
    assert len(read_rows(tmp_path / "out/toy.csv")) == 12


def test_the_deadline_stops_what_runs(tmp_path: Path, fake_worker: None) -> None:
    lines = run(tmp_path, "sima waits", jobs=2, deadline=1.5)
    assert {row["arm"] for row in read_rows(tmp_path / "out/toy.csv")} == {"softmax"}
    assert any("stopped sima 0; the same command resumes it" in line for line in lines)


def test_runs_of_an_arm_share_a_process(tmp_path: Path, fake_worker: None) -> None:
    run(tmp_path, jobs=2)
    processes = {(row["arm"], row["torch"]) for row in read_rows(tmp_path / "out/toy.csv")}
    assert len(processes) == 2  # one for each arm, tuning included
    run(tmp_path / "apart", jobs=2, reuse=False)
    rows = read_rows(tmp_path / "apart/out/toy.csv")
    assert len({row["torch"] for row in rows}) == len(rows) == 12


def test_a_run_that_fails_after_another_gets_a_process_of_its_own(tmp_path: Path, fake_worker: None) -> None:
    lines = run(tmp_path, "second runs fail", jobs=2)
    assert len(read_rows(tmp_path / "out/toy.csv")) == 12
    assert any("trying again in one of its own" in line for line in lines)
    assert not any("FAILED" in line for line in lines)


def test_results_of_a_killed_study_become_rows(tmp_path: Path, fake_worker: None) -> None:
    run(tmp_path, jobs=2)
    path = tmp_path / "out/toy.csv"
    (first, *_), job = read_rows(path), list_jobs(toy_study(looks=[3]), [])[0]
    path.unlink()
    result = {key: first[key] for key in ("status", "metrics", "settings")} | {"score": 99.0, "seconds": 1.0}
    (tmp_path / f"runs/results/{job.name}.json").write_text(json.dumps(result | {"images_per_second": 9.0}))
    run(tmp_path, jobs=2)
    rows = read_rows(path)
    assert len(rows) == 12
    assert [row["score"] for row in rows if (int(row["seed"]), row["settings_hash"]) == job.key] == ["99.0"]


def test_a_study_killed_while_it_writes_goes_on(tmp_path: Path, fake_worker: None) -> None:
    """Half a row is no row, and the flags of a run whose row is missing are not written twice."""
    run(tmp_path, jobs=2)
    path, correct = tmp_path / "out/toy.csv", tmp_path / "out/toy_correct.csv"
    whole, bits = read_rows(path), read_rows(correct)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:-30])
    assert read_rows(path) == whole[:-1]
    run(tmp_path, jobs=2)
    assert [key_of(row) for row in read_rows(path)] == [key_of(row) for row in whole]
    assert read_rows(correct) == bits
    path.write_bytes(lines[0][:10])
    assert read_rows(path) == []
    write_row(path, whole[0])
    assert [row["arm"] for row in read_rows(path)] == [whole[0]["arm"]]


def test_the_next_run_has_another_arm_then_is_tuning_then_long() -> None:
    base = list_jobs(toy_study(), [])[0]
    names = (("a", "tune", 1), ("b", "final", 1), ("b", "final", 5), ("c", "tune", 1))
    jobs = [replace(base, arm=arm, phase=phase, minutes=minutes) for arm, phase, minutes in names]
    order = []
    for busy in ([], ["a"], ["a", "c"], ["a", "c", "b"]):
        chosen = next_job(jobs, [(base.study, arm) for arm in busy])
        jobs.remove(chosen)
        order.append((chosen.arm, chosen.minutes))
    assert order == [("a", 1), ("c", 1), ("b", 5), ("b", 1)]
    later, first = replace(base, arm="a", look=1), replace(base, arm="b", phase="final")
    assert next_job([later, first], [(base.study, "b")]) == first  # every claim is tested once before one is again


def test_unknown_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no data 'cifar'; it has stripes: --data NAME=SOURCE"):
        run_study(toy_study(), {"cifar": "x"}, tmp_path, tmp_path, device="cpu")


@pytest.fixture(scope="module")
def stripes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Data as `decode_once` writes it."""
    data, path = tiny_data(), tmp_path_factory.mktemp("data") / "stripes.npz"
    arrays = {
        f"{name}_{key}": t.numpy()
        for name in ("train", "val")
        for key, t in zip(("images", "labels"), getattr(data, name).arrays(), strict=True)
    }
    np.savez(path, name="stripes", classes=np.array(data.classes), **arrays)
    return str(path)


def test_worker(tmp_path: Path, stripes: str) -> None:
    job = list_jobs(toy_study(), [])[0]
    given = {
        "settings": job.settings,
        "seed": 0,
        "holdout": 20,
        "images": None,
        "source": stripes,
        "probes": ["occlusion", "fgsm", "attention_entropy"],
        "device": "cpu",
    }
    row = train_job(given | {"folder": str(tmp_path / "run")})
    assert (row["status"], row["train_images"], row["epochs"]) == ("finished", 60, 1)
    assert row["score"] == json.loads(row["metrics"])["top1"] == json.loads(row["curve"])[-1][2]
    model = create_body("columnar_tiny", "softmax", num_classes=4, img_size=8, **job.settings["model_kwargs"])
    assert row["parameters"] == sum(p.numel() for p in model.parameters())
    metrics = json.loads(row["metrics"])
    assert {"top1", "occlusion_45", "fgsm_2"} < set(metrics)
    assert 0 < metrics["attention_entropy"] <= math.log(4) + 1e-6  # of 2 x 2 tokens
    assert "correct" not in row  # not of held-out images
    final = given | {"holdout": 0, "probes": [], "folder": str(tmp_path / "final")}
    row = train_job(final)
    flags = unpack_bits(row["correct"], 37)
    assert 100 * flags.mean() == pytest.approx(row["score"])
    diverging = {**job.settings, "lr": 1e30, "min_lr": 0, "optimizer": "sgd", "epochs": 3, "eval_every": 3}
    row = train_job(given | {"settings": diverging, "folder": str(tmp_path / "diverging")})
    assert (row["status"], row["metrics"]) == ("diverged", "{}")
    with pytest.MonkeyPatch.context() as patch:
        evaluate = Classify.evaluate
        patch.setattr(Classify, "evaluate", lambda *args: evaluate(*args) | {"loss": math.nan})
        row = train_job(given | {"folder": str(tmp_path / "nan outputs")})
    assert (row["status"], row["metrics"]) == ("diverged", "{}")


@pytest.fixture
def jobs(tmp_path: Path, stripes: str) -> list[Path]:
    """Files of two runs of one arm."""
    paths = []
    for i, job in enumerate(list_jobs(toy_study(), [])[:2]):
        more = {"source": stripes, "folder": str(tmp_path / f"run{i}"), "device": "cpu"}
        paths.append(tmp_path / f"{i}.job")
        what = asdict(job) | more | {"result": str(tmp_path / f"{i}.json")}
        paths[-1].write_text(json.dumps(what))
    return paths


def test_runs_in_one_process_equal_runs_alone(tmp_path: Path, jobs: list[Path]) -> None:
    lines = iter([f"{path}\n" for path in jobs])
    work(lambda: next(lines, ""), lambda: None)
    second = load_file(tmp_path / "run1/model.safetensors")
    alone = train_job(json.loads(jobs[1].read_text()) | {"folder": str(tmp_path / "alone")})
    row = json.loads((tmp_path / "1.json").read_text())
    assert (row["status"], row["score"]) == ("finished", alone["score"])
    other = load_file(tmp_path / "alone/model.safetensors")
    assert all(torch.equal(second[name], other[name]) for name in other)


@pytest.mark.gpu
def test_runs_in_one_process_share_compiled_code_on_a_gpu(tmp_path: Path, jobs: list[Path]) -> None:
    """The second network of a process runs in the first one's code, and in CUDA graphs of its own."""
    for path in jobs:
        job = json.loads(path.read_text())
        path.write_text(json.dumps(job | {"device": "cuda", "settings": job["settings"] | {"compile": True}}))
    lines = iter([f"{jobs[0]}\n", f"{jobs[1]}\n"])
    work(lambda: next(lines, ""), lambda: None)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    alone = train_job(json.loads(jobs[1].read_text()) | {"folder": str(tmp_path / "alone")})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    eager = json.loads(jobs[1].read_text()) | {"folder": str(tmp_path / "eager")}
    plain = train_job(eager | {"settings": eager["settings"] | {"compile": False}})
    losses = [
        json.loads(row["metrics"])["loss"] for row in (json.loads((tmp_path / "1.json").read_text()), alone, plain)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-3)


def test_a_run_stops_if_its_study_is_killed(jobs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the input during a run means that nobody waits for it; after a run it is the usual end."""
    stopped, ended = threading.Event(), threading.Event()

    def read_line() -> str:
        ended.wait(5)
        return ""

    def train(job: dict[str, Any]) -> dict[str, Any]:
        if "run0" in job["folder"]:
            ended.set()
            assert stopped.wait(5)
        return {"status": "finished"}

    monkeypatch.setattr(worker, "train_job", train)
    lines = iter([f"{jobs[0]}\n"])
    work(lambda: next(lines, None) or read_line(), stopped.set)
    assert stopped.is_set()
    stopped.clear()
    lines = iter([f"{jobs[1]}\n"])
    result = Path(json.loads(jobs[1].read_text())["result"])

    def after_the_result() -> str:
        while not result.exists():
            time.sleep(0.01)
        return ""

    work(lambda: next(lines, None) or after_the_result(), stopped.set)
    assert not stopped.is_set()


def test_a_run_waits_for_the_same_run_of_a_killed_study(jobs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The old process saves its state and stops; until then the folder is locked."""
    job, locked = json.loads(jobs[0].read_text()), [True, True, False]
    with lock_folder(Path(job["folder"])), monkeypatch.context() as patch:
        patch.setattr(worker, "PATIENCE", 0.2)
        with pytest.raises(LockedError, match="is used by process"):
            train_job(job)
    monkeypatch.setattr(worker, "is_locked", lambda folder: locked.pop(0))
    assert train_job(job)["status"] == "finished"
    assert not locked


def test_speed() -> None:
    recipe = create_recipe({**list_jobs(toy_study(), [])[0].settings, "name": "softmax"})
    train, infer = prepare(recipe, "train", 8, {}, "cpu")(), prepare(recipe, "infer", 16, {"patch_size": 8}, "cpu")()
    assert (train["mode"], train["size"], infer["mode"], infer["size"]) == ("train", 8, "infer", 16)
    assert min(train["images_per_second"], infer["images_per_second"]) > 0


def test_data_is_decoded_once_and_split(tmp_path: Path, stripes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokamix.study.data.create_dataset", lambda source: tiny_data())
    path = decode_once("stripes", "classify", tmp_path)
    monkeypatch.setattr("tokamix.study.data.create_dataset", None)
    assert decode_once("stripes", "classify", tmp_path) == path
    assert decode_once("folder", "segment", tmp_path) == "folder"
    whole, held_out = load_splits(path), load_splits(path, holdout=20)
    assert (len(whole.train), len(whole.val), len(held_out.train), len(held_out.val)) == (80, 37, 60, 20)
    assert torch.equal(held_out.val.images, load_splits(path, holdout=20, seed=3).val.images)
    few = load_splits(path, images=10, seed=1).train
    assert sorted(few.labels.bincount().tolist()) == [2, 2, 3, 3]
    assert not torch.equal(few.images, load_splits(path, images=10, seed=2).train.images)
    with pytest.raises(ValueError, match="81 images are asked for, but the training set has 80"):
        draw_balanced(whole.train.labels, 81, 0)
    with pytest.raises(ValueError, match="needs images of one size"):
        load_splits("photos", images=10)


def texts(path: Path, study: Study, results: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of a study's figure."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **options: (figures.append(self), save(self, *args, **options))
    )
    draw_figure(study, path, results)
    assert path.stat().st_size > 10_000
    return [text.get_text() for text in figures[-1].findobj(Text) if text.get_text()]


def test_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has rows is drawn, what has none says so."""
    study, png = toy_study(), tmp_path / "figure.png"
    with pytest.raises(ValueError, match="no finished runs"):
        draw_figure(study, png, tmp_path)
    rows = with_runs(study, tuned(study), softmax=[50.0, 50.1, 50.2])
    for row in rows:
        write_row(tmp_path / "toy.csv", row)
    found = texts(png, study, tmp_path, monkeypatch)
    assert found.count("not measured") == 2  # SimA's accuracy, and the same after equal time
    assert not any(text.startswith("Inference") for text in found)
    assert {"50.1", "softmax, 2 epochs", "Accuracy after 2 epochs"} <= set(found)
    speeds = []
    for arm, speed in (("softmax", 100), ("sima", 250)):
        for mode in ("train", "infer"):
            row = {"arm": arm, "mode": mode, "size": 8, "images_per_second": speed, "peak_gb": "", "status": "measured"}
            write_row(tmp_path / "toy_speed.csv", row | {"gpu": "a GPU"}, SPEED_COLUMNS)
            speeds.append(row)
    for seed, score in ((10, 60.0), (11, 60.2)):
        job = final_job(study, study.arms["time_sima"], seed, rows, speeds)
        assert job is not None
        write_row(tmp_path / "toy.csv", row_of(job, score) | {"epochs": "5"})
    found = texts(png, study, tmp_path, monkeypatch)
    assert found.count("not measured") == 1
    assert {"60.1", "sima, 5 epochs", "Inference on a GPU", "8\n100/s", "2x"} <= set(found)


def test_figure_of_two_bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row for each mixer; the legend names the bodies, and speed is that of the first."""
    found = texts(tmp_path / "figure.png", load_study("fair_comparison"), RESULTS, monkeypatch)
    assert {"column", "pyramid", "super token", "Accuracy after equal time in the column"} <= set(found)
    assert not {"column super token", "pyramid super token", "not measured"} & set(found)


def test_command(tmp_path: Path) -> None:
    assert "fair_comparison" in call("study")
    plan = call("study", "fair_comparison", "--plan", "--jobs", 6, "-o", tmp_path)
    assert "can start: tune pyramid_softmax seed 0 lr x 1" in plan
    assert "left: 126 runs" in plan
    assert "with 6 at a time" in plan
    assert "5 seeds of each arm resolve a difference of 0.6 points" in plan
    assert "no study 'fair_comparisons'; did you mean" in call("study", "fair_comparisons", code=1)
    assert "--data 'cifar100' is not NAME=SOURCE" in call("study", "fair_comparison", "--data", "cifar100", code=1)
    call("study", "--page", tmp_path / "claims.md", "-o", tmp_path)
    assert (tmp_path / "claims.md").read_text().startswith("# Claims, tested")
    call("study", "sima", "--page", tmp_path / "sima.md", "-o", tmp_path)
    assert re.findall(r"^- `(\w+)`", (tmp_path / "sima.md").read_text(), re.MULTILINE) == ["sima"]


@pytest.mark.parametrize(
    ("jobs", "has_gpu", "threads"), [(1, False, None), (2, False, 4), (20, False, 1), (8, True, 2)]
)
def test_runs_on_a_cpu_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, jobs: int, has_gpu: bool, threads: int | None
) -> None:
    """A run alone chooses itself; threads of several runs are no more than the cores."""
    monkeypatch.setattr(importlib.import_module("tokamix.train.setup.threads"), "usable_cores", lambda: 8)
    assert threads_of_run(jobs, has_gpu) == threads


def test_environment_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Waiting threads spin briefly; what the user has set is kept."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    env = environment(tmp_path, mps=False, threads=None)
    assert env["GOMP_SPINCOUNT"] == "1000"
    assert "OMP_NUM_THREADS" not in env
    assert environment(tmp_path, mps=False, threads=3)["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GOMP_SPINCOUNT", "100")
    env = environment(tmp_path, mps=False, threads=3)
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["GOMP_SPINCOUNT"] == "100"
