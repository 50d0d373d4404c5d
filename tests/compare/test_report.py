"""The page of a comparison, rendered from invented numbers."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from tokamix.compare.report import (
    COLOURS,
    Cost,
    CostAtSize,
    Curves,
    Example,
    Report,
    Result,
    Texts,
    amount,
    log_ticks,
    outside,
    render,
)

NAMES = ("softmax", "softmax_cb", "sima", "active_token", "super_token", "weight_mixing")


def make_report(seeds: int = 1, **changes) -> Report:
    sizes = (
        CostAtSize(64, 8_760_000, 98_304),
        CostAtSize(256, 40_000_000, 400_000),
        CostAtSize(1024, 9 * 10**8, 10**7),
    )
    results = [
        Result(
            title=f"The mixer {name}",
            description="a description",
            link="https://example.org/paper",
            curves=tuple(Curves((2.0, 0.5, 0.25), (40.0, 90.0, 95.0 + i / 2 + seed)) for seed in range(seeds)),
            parameters=123_456 + i,
            costs=sizes,
            latency_ms=1.25 + i,
            seconds=17.0 + i,
            before=torch.rand(8, 8),
            after=torch.rand(8, 8),
        )
        for i, name in enumerate(NAMES)
    ]
    values = {
        "texts": Texts("The title", "The lead.", "A note.", ["It is small."]),
        "results": results,
        "costs": [Cost("<mine>", 54_321, 7_650_000, 4_321, 3.4)],
        "example": Example(torch.rand(8, 8, 3), "7", (4, 4, 2)),
        "train_images": 1437,
        "test_images": 360,
        "epochs": 3,
        "seeds": tuple(range(seeds)),
        "body": "a small body",
        "recipe": "digits",
        "device": "CPU",
        "machine": "a processor",
        "date": "1 May 2030",
        "docs": [("Training", "docs/training.md")],
    }
    return Report(**(values | changes))


class Page(HTMLParser):
    """Tags with their attributes; every tag must be closed by its own."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def count(self, tag: str, **attributes: str) -> int:
        return sum(name == tag and attributes.items() <= attrs.items() for name, attrs in self.tags)


@pytest.mark.parametrize("seeds", [1, 3])
def test_page_is_self_contained(seeds: int) -> None:
    text = render(make_report(seeds))
    page = Page(text)
    assert not page.count("script")
    assert not re.search(r"@import|url\(|srcset|<iframe|<object", text)
    for tag, attributes in page.tags:
        address = attributes.get("src") or (attributes.get("href") if tag != "a" else None)
        assert address is None or address.startswith("data:"), (tag, attributes)
    assert len(text) < 300_000


def test_page_shows_every_number() -> None:
    text = render(make_report())
    for i in range(6):
        assert f"<td>{95 + i / 2:.1f}\u00a0%</td><td>123 k</td><td>8.76 M</td><td>98.3 k</td>" in text
        assert f"<td>{1.25 + i:.1f} ms</td><td>{17 + i} s</td>" in text
    for fact in (
        "1,437",
        "360",
        "3 epochs, seed 0",
        "a small body",
        "a processor",
        "1 May 2030",
        "The title",
        "The lead.",
    ):
        assert fact in text
    for name in NAMES:
        assert f"The mixer {name}" in text
    assert "A note." in text
    assert "<li>It is small.</li>" in text
    assert '<a href="docs/training.md">Training</a>' in text


def test_charts_and_receptive_fields() -> None:
    page = Page(render(make_report(seeds=3)))
    assert page.count("svg") == 4
    assert page.count("path", **{"class": "line"}) == 4 * 6
    assert page.count("path", **{"class": "band"}) == 2 * 6
    assert page.count("img") == 1 + 2 * 6
    for _, attributes in page.tags:
        for x, y in re.findall(r"([-\d.]+) ([-\d.]+)", attributes.get("d") or ""):
            assert 0 <= float(x) <= 400
            assert 0 <= float(y) <= 270
    assert not Page(render(make_report())).count("path", **{"class": "band"})


def test_every_axis_has_labels() -> None:
    """Also between two powers of ten."""
    labels = {
        limits: [text for _, text in log_ticks(*limits)] for limits in ((80, 2e4), (3.8e6, 7.7e6), (2.1e3, 4.4e3))
    }
    assert list(labels.values()) == [["100", "1 k", "10 k"], ["4 M", "5 M", "6 M", "7 M"], ["3 k", "4 k"]]


def test_several_seeds_show_their_range() -> None:
    assert "96.0\u00a0%<small>95.0 to 97.0</small>" in render(make_report(seeds=3))


def test_noise() -> None:
    """Two standard errors of 96.25 % on 360 images."""
    assert make_report().noise == pytest.approx(200 * (0.9625 * 0.0375 / 360) ** 0.5)
    perfect = replace(make_report().results[0], curves=(Curves((1.0,), (100.0,)),))
    assert 0 < make_report(results=[perfect]).noise < 1


@pytest.mark.parametrize("accuracy", [0.0, 50.0, 99.7, 100.0])
def test_extreme_curves_are_drawn(accuracy: float) -> None:
    curves = Curves((0.0,), (accuracy,))
    text = render(make_report(results=[replace(make_report().results[0], curves=(curves,))], epochs=1))
    assert not re.search(r"\b(nan|inf)\b", text)


def test_text_is_escaped() -> None:
    evil = '<script>alert("x")</script> & $more'
    example = Example(torch.rand(8, 8, 3), evil, (4, 4, 2))
    texts = Texts(evil, evil, evil, [evil])
    report = make_report(texts=texts, example=example, body=evil, recipe=evil, machine=evil, date=evil)
    report = replace(report, docs=[(evil, f'"{evil}')])
    report = replace(report, results=[replace(report.results[0], title=evil, description=evil, link=f'"{evil}')])
    text = render(report)
    assert "<script" not in text
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; $more" in text
    assert not Page(text).count("script")


def test_amounts() -> None:
    numbers = (0, 987, 1000, 12_345, 234_567, 1_234_567, 9.87e9)
    assert list(map(amount, numbers)) == ["0", "987", "1.00 k", "12.3 k", "235 k", "1.23 M", "9.87 G"]
    assert [amount(n, 1) for n in (10, 1e4, 1e6)] == ["10", "10 k", "1 M"]


def test_fraction_outside_the_patch() -> None:
    field = torch.ones(8, 8)
    assert outside(field, (4, 4, 2)) == pytest.approx(60 / 64)
    field[4:6, 4:6] = 0
    assert outside(field, (4, 4, 2)) == 1


def test_every_mixer_is_listed() -> None:
    page = render(make_report())
    assert "<code>&lt;mine&gt;</code></th><td>54.3 k</td><td>7.65 M</td><td>4.32 k</td><td>3.4 ms</td>" in page


def test_estimated_receptive_fields() -> None:
    example = make_report().example
    assert example is not None
    assert "estimated" not in render(make_report())
    assert "estimated from 16 random directions" in render(make_report(example=example._replace(probes=16)))


def test_page_without_receptive_fields() -> None:
    page = Page(render(make_report(example=None)))
    assert not page.count("img")
    assert page.count("svg") == 4


def test_every_mixer_has_its_own_colour() -> None:
    results = [make_report().results[0]] * len(COLOURS)
    text = render(make_report(results=results))
    colours = re.findall(r"\.mixer\d+ { --c: (#\w{6}) }", text)
    assert len(colours) == len(set(colours)) == 2 * len(COLOURS)
    page = Page(text)
    assert all(page.count("tr", **{"class": f"mixer{i}"}) == 1 for i in range(len(COLOURS)))
