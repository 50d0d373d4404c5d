"""The tabs Compare, Train, and Detect and segment in the browser."""

import re
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from tests.browser.conftest import choose, open_tab, upload


def test_compare_plots_and_measures(page: Any) -> None:
    """Other axes and results change the plot; a measurement of this machine appears in it."""
    open_tab(page, "Compare")
    marks = page.locator("#compare-plot .plot_marks path")
    expect(marks).to_have_count(6)
    assert "accuracy" in marks.first.get_attribute("aria-label")
    page.get_by_label("shipped, cifar100").check()
    expect(marks).to_have_count(12)
    choose(page, "Horizontal axis", "memory (GB)")
    expect(page.locator("#compare-summary")).to_contain_text("None of the 12 results")
    page.get_by_text("Measure on this machine").click()
    page.locator("#measure").click()
    expect(page.locator("#compare-summary")).to_contain_text("3 of 3 results have both accuracy (%) and milliseconds")
    expect(marks).to_have_count(3)


def test_train_starts_stops_and_resumes_a_run(page: Any, workspace: Path) -> None:
    """A run on one's own folder: it is watched live, stopped with its state saved, and resumed."""
    open_tab(page, "Train")
    page.get_by_text("Start a run").click()
    choose(page, "Data", re.compile("photos$"))
    page.get_by_label("number input for Epochs").fill("200")
    page.locator("#start").click()
    status = page.locator("#run-status")
    expect(status).to_contain_text("running", timeout=90_000)
    expect(status).to_contain_text("left, evaluation not counted", timeout=60_000)
    expect(page.locator("#loss-plot .mark-line path").first).to_be_attached()
    expect(page.locator("#run-log textarea")).to_have_value(re.compile("epoch"))
    page.locator("#stop").click()
    expect(status).to_contain_text("stopped")
    (folder,) = (workspace / "runs").glob("photos-*")
    assert (folder / "state" / "state.safetensors").is_file()
    before = (folder / "metrics.jsonl").read_text()
    page.locator("#resume").click()
    expect(status).to_contain_text("running", timeout=90_000)
    page.wait_for_function("document.querySelector('#run-log textarea').value.includes('epoch')")
    page.locator("#stop").click()
    expect(status).to_contain_text("stopped")
    assert (folder / "metrics.jsonl").read_text().startswith(before.splitlines()[0])


def test_runs_are_compared(page: Any) -> None:
    open_tab(page, "Train")
    page.locator("#runs").get_by_role("button", name="Clear").click()
    page.get_by_role("combobox", name=re.compile("^Runs")).click()
    page.get_by_role("option", name=re.compile("first$")).click()
    page.get_by_role("option", name=re.compile("second$")).click()
    page.keyboard.press("Escape")
    expect(page.locator("#run-status li")).to_have_count(2)
    expect(page.locator("#score-plot")).to_contain_text("second")
    expect(page.locator("#run-pictures img").first).to_be_visible()


def test_a_run_with_bad_data_says_why(page: Any, workspace: Path) -> None:
    """The sentence of `tokamix train` reaches the page."""
    open_tab(page, "Train")
    page.get_by_text("Start a run").click()
    choose(page, "Data", re.compile("photos$"))
    choose(page, "Task", "detect objects")
    page.locator("#start").click()
    expect(page.get_by_test_id("toast-body")).to_contain_text("the run did not start", timeout=90_000)
    assert not list((workspace / "runs").glob("photos-*-detect"))


def test_detector_and_threshold(page: Any, photo: Path) -> None:
    """A higher threshold shows fewer objects; a segmenter answers with areas."""
    open_tab(page, "Detect and segment")
    choose(page, "Trained model", re.compile("detector$"))
    threshold = page.get_by_label(re.compile("^number input for Smallest score"))
    threshold.fill("0.05")
    upload(page, "#dense-photo", photo)
    summary, picture = page.locator("#dense-summary"), page.locator("#dense-result img")
    expect(summary).to_contain_text("Found: ")
    expect(summary).not_to_contain_text("nothing")
    first = picture.get_attribute("src")
    assert "The photo with" in picture.get_attribute("alt")
    threshold.fill("0.95")
    threshold.press("Tab")
    expect(summary).to_contain_text("Found: nothing")
    expect(picture).not_to_have_attribute("src", first)
    choose(page, "Trained model", re.compile("segmenter$"))
    expect(summary).to_contain_text("%")
    second = picture.get_attribute("src")
    page.locator("#dense-sample").click()
    expect(picture).not_to_have_attribute("src", second)
