"""The tab Look: views, models, pictures, and what its handlers return."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import gradio as gr
import pytest

from tokamix.explain import QUESTIONS
from tokamix.studio import StudioSettings, explainers
from tokamix.studio.explainers import MAX_EXPLANATIONS, check_source, list_sources
from tokamix.studio.look import Look
from tokamix.studio.photos import sample_photo
from tokamix.studio.view import View

SIMA, ACTIVE, SUPER = (f"pyramid_nano_{mixer}.cifar100" for mixer in ("sima", "active_token", "super_token"))
VIEW = View("flower", (SIMA,), ("mixing_row",), layer=3, head=1, y=0.25, x=0.75)


@pytest.fixture(scope="module")
def look(settings: StudioSettings) -> Look:
    return Look(settings)


def values(view: View) -> list[Any]:
    return [view.photo, list(view.models), list(view.pictures), view.layer, view.head, view.y, view.x]


def test_links_restore_views() -> None:
    for view in (View(), VIEW, dataclasses.replace(VIEW, models=(SIMA, SUPER), pictures=tuple(QUESTIONS), x=1 / 3)):
        restored = View.from_query(dict(parse_qsl(view.query)))
        assert restored.x == pytest.approx(view.x, abs=1e-3)
        assert dataclasses.replace(restored, x=view.x) == view
    assert View.from_query({"__theme": "dark"}) == View()
    assert "photo" not in dataclasses.replace(VIEW, photo="upload-1f").query


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ({"models": "a,b,c,d"}, "one to 3 models"),
        ({"models": "a,,c"}, "1 to 300 characters"),
        ({"models": "x" * 1000}, "1 to 300 characters"),
        ({"pictures": "mixing_rows"}, "did you mean mixing_row"),
        ({"layer": "two"}, "the link is damaged"),
        ({"head": "-1"}, "counted from 1"),
        ({"token": "0.5"}, "the link is damaged"),
        ({"token": "nan,0"}, "outside of the image"),
        ({"photo": "/etc/passwd"}, "no sample '/etc/passwd'"),
        ({"photo": "upload-00"}, "no sample"),
    ],
)
def test_damaged_links(query: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        View.from_query(query)


def test_models_to_choose_from(settings: StudioSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for _, name in list_sources(settings)]
    assert SIMA in names
    (run,) = (name for name in names if name.startswith("/"))
    for name in (SIMA, "resnet18", "deit_tiny_patch16_224.fb_in1k"):
        assert check_source(name, settings) == name
    assert check_source(run, settings) == run
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resnet18").mkdir()  # a folder of the same name would be loaded instead
    bad = ("resnet18", "../runs", "/etc/passwd", "hf-hub:user/name", "local-dir:/etc", "resnet18./../../etc", "<b>")
    for name in (*bad, str(tmp_path)):
        with pytest.raises(ValueError, match="no model of that name"):
            check_source(name, settings)


def test_pictures_of_three_models(look: Look) -> None:
    pictures = ("mixing_row", "sampled_positions", "super_token_regions", "query_key_norms", "effective_rank")
    view = View("temple", (SIMA, ACTIVE, SUPER), pictures, y=0.1, x=0.9)
    html = look.draw(view)
    assert look.count(view) == (8, 6)
    assert html.count("<section>") == 1 + len(pictures)
    assert html.count('class="predictions"') == 3
    assert html.count('class="heat"') == 3 + 2 + 2
    assert html.count('class="tint"') == 1
    assert html.count('class="mean"') == 3
    assert html.count("not for this mixer") == 2 + 2 + 2
    for key in pictures:
        assert QUESTIONS[key].sentence.split(":")[0].split("'")[0] in html
        assert f'href="{QUESTIONS[key].link}"' in html
    assert all(re.search(r'alt="[^"]', image) or "-below" in image for image in re.findall("<img[^>]*>", html))
    assert "<script" not in html


def test_the_token_moves_the_pictures(look: Look) -> None:
    first, second = (look.draw(dataclasses.replace(VIEW, y=y)) for y in (0.1, 0.9))
    assert first != second
    assert look.draw(dataclasses.replace(VIEW, y=0.1)) == first
    rows = int(re.search(r'data-rows="(\d+)"', first).group(1))
    assert f'y="{int(0.1 * rows)}"' in first
    assert f'y="{int(0.9 * rows)}"' in second


def test_every_question(look: Look) -> None:
    for models in ((SUPER,), (ACTIVE,), ("pyramid_nano_softmax.cifar100", "pyramid_nano_weight_mixing.cifar100")):
        html = look.draw(View("shapes", models, tuple(key for key in QUESTIONS if key != "saliency")))
        assert html.count("<section>") == len(QUESTIONS)


def test_a_layer_that_cannot_be_asked_leaves_the_others(look: Look) -> None:
    html = look.draw(View("flower", (SUPER,), ("super_token_regions", "mixing_row"), layer=8, head=9))
    assert "cannot answer" in html or "has no head 8" in html
    assert html.count("<section>") == 3


def test_run_folders(look: Look, settings: StudioSettings) -> None:
    (run,) = (name for _, name in list_sources(settings) if name.startswith("/"))
    assert "predictions" in look.draw(View("flower", (run,), ("mixing_row",)))


def test_untrained_networks_are_named(look: Look) -> None:
    html = look.draw(View("shapes", ("columnar_tiny_sima", SIMA), ("mixing_row",)))
    assert html.count("untrained: there are no weights of this name") == 1


def test_little_is_kept(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explainers, "MAX_MODELS", 1)
    for photo in ("flower", "shapes", "temple", "parachute"):
        for model in (SIMA, ACTIVE, SUPER, "pyramid_nano_softmax.cifar100"):
            look.explainers.explain(photo, model)
    assert len(look.explainers._explanations) == MAX_EXPLANATIONS
    assert len(look.explainers._explainers) == 1


def test_png(look: Look) -> None:
    view = View("flower", (SIMA, ACTIVE), ("mixing_row", "sampled_positions", "effective_rank"))
    assert look.save(view).startswith("data:image/png;base64,iVBOR")


def test_handlers(handlers: dict[str, Callable[..., Any]], tmp_path: Path) -> None:
    html, link, query = handlers["draw"](*values(VIEW))
    assert query == VIEW.query
    assert VIEW.query in link
    y, x, moved, *_ = handlers["choose_token"](SimpleNamespace(y=0.9, x=0.12345), *values(VIEW))
    assert (y, x) == (0.9, 0.123)
    assert moved != html
    request = SimpleNamespace(query_params=dict(parse_qsl(VIEW.query)))
    assert handlers["open_link"](request)[8] == html
    with pytest.warns(UserWarning, match="a&lt;b"):
        assert handlers["open_link"](SimpleNamespace(query_params={"photo": "a<b"}))[:2] == ("temple", "temple")
    layers, heads, drawn, *_ = handlers["choose_models"](*values(VIEW))
    assert (layers["maximum"], heads["maximum"], drawn) == (8, 6, html)
    photo = tmp_path / "photo.png"
    sample_photo("flower").save(photo)
    key, sample, upload, drawn, *_ = handlers["take_photo"](str(photo), *values(VIEW))
    assert (sample, upload) == (None, None)
    assert not photo.exists()
    assert drawn == html  # the same pixels
    assert handlers["draw"](key, *values(VIEW)[1:])[0] == html
    assert handlers["choose_sample"]("flower", key, *values(VIEW)[1:])[:2] == ("flower", html)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"models": ["<img src=x onerror=alert(1)>"]}, "&lt;img src=x"),
        ({"models": []}, "choose one to 3 models"),
        ({"photo": "upload-00"}, "no longer kept"),
        ({"layer": "x"}, "invalid literal"),
        ({"y": 7}, "outside of the image"),
        ({"models": 5}, "because of a bug"),
    ],
)
def test_errors_are_sentences(handlers: dict[str, Callable[..., Any]], change: dict[str, Any], text: str) -> None:
    fields = dict(zip(("photo", "models", "pictures", "layer", "head", "y", "x"), values(VIEW), strict=True))
    with pytest.raises(gr.Error) as raised:
        handlers["draw"](*(fields | change).values())
    assert text in raised.value.message
    assert "<" not in raised.value.message
    assert raised.value.print_exception is False
