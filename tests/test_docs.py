"""The documentation: Python blocks run, commands exist, generated tables are current, the site builds."""

import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import typer.main
import yaml
from PIL import Image

from tests.processes import finish, run_script
from tests.train.tiny_dense import run, tiny_scenes
from tokamix.cli import app
from tokamix.mixers import list_mixers
from tokamix.models.bodies import BODIES
from tokamix.recipes import list_recipes
from tokamix.train import train

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "examples/README.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md") if p.name != "benchmarks.in.md"),
]
OWN_PROCESS = {
    "docs/guides/add-a-mixer.md",  # test_add_a_mixer
    "docs/guides/own-task.md",  # test_own_task
}
TINY = {"epochs": 1, "image_size": 16, "model_kwargs": {"patch_size": 8, "dim": 16, "depth": 1, "num_heads": 2}}


class Block(NamedTuple):
    """A fenced block; `not_run` is the reason in a comment above it, if it has one."""

    language: str
    text: str
    not_run: str


def blocks(page: str, language: str) -> list[Block]:
    pattern = r"^(?:<!-- not run: ([^\n]+) -->\n)?```(\w+)[^\n]*\n(.*?)^```$"
    found = re.findall(pattern, (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [Block(kind, text, reason) for reason, kind, text in found if kind == language]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages assume: photos/, portrait.jpg, the classifier runs/photos, the detector runs/objects."""
    folder = tmp_path_factory.mktemp("workspace")
    for i, (part, name) in enumerate((p, n) for p in ("train", "val") for n in ("cat", "dog")):
        (folder / "photos" / part / name).mkdir(parents=True)
        for j in range(4):
            colour = (40 * i, 60 * j, 90)
            Image.new("RGB", (20, 24), colour).save(folder / "photos" / part / name / f"{j}.jpg")
    Image.new("RGB", (60, 80), (90, 120, 200)).save(folder / "portrait.jpg")
    photos = str(folder / "photos")
    settings: dict[str, Any] = {**TINY, "batch_size": 4}
    train("columnar_tiny_sima", photos, "small", folder / "runs/photos", overrides=settings, device="cpu", quiet=True)
    scenes = tiny_scenes("detect", train=4, val=1, side=64)
    kwargs = {"width": 16, "rois_per_image": 16}
    run("detect", folder / "runs/objects", scenes, iterations=1, eval_every=1, method="mask_rcnn", method_kwargs=kwargs)
    return folder


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p, "python") and "add-a-mixer" not in p and "own-" not in p]
)
def test_python_blocks_run(page: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run one after the other in one namespace, in a folder with data and runs."""
    monkeypatch.chdir(workspace)
    scope: dict[str, Any] = {"__name__": "page"}
    chosen = [block for block in blocks(page, "python") if not block.not_run]
    for block in chosen:
        exec(compile(block.text, page, "exec"), scope)
    if page == "README.md":
        assert scope["logits"].shape == (1, 10)
        assert len(scope["maps"]) == 4
    if page == "docs/guides/dense.md":
        assert scope["classes"].shape == (2, 100, 150)
    if page == "docs/guides/data.md":
        assert [image.shape[0] for image in scope["images"]] == [3] * 4


def test_most_blocks_are_run() -> None:
    """A block is left out with a reason only, and few are."""
    every = [block for page in PAGES for block in blocks(page, "python")]
    assert len(every) >= 15
    assert sum(bool(block.not_run) for block in every) <= 3


def test_own_task() -> None:
    """The page shows examples/own_task.py, which tests/test_examples.py runs."""
    (block,) = blocks("docs/guides/own-task.md", "python")
    example = [
        line.partition("  # noqa")[0].strip() for line in (ROOT / "examples/own_task.py").read_text().splitlines()
    ]
    assert [line for line in block.text.splitlines() if line.strip() not in example] == []


@pytest.mark.xdist_group("processes")
def test_add_a_mixer(tmp_path: Path) -> None:
    """The page's code prints what the page shows, and the tests of every mixer pick the new one up."""
    page = "docs/guides/add-a-mixer.md"
    mixer, use = (block.text for block in blocks(page, "python"))
    (printed,) = (block.text for block in blocks(page, "text"))
    assert len(mixer.splitlines()) <= 30
    # in its own process: a registered mixer stays registered
    (tmp_path / "page.py").write_text(
        f"{mixer}\n{use}\nimport pytest, sys\nsys.stdout.flush()\n"
        "sys.exit(pytest.main(['tests/mixers/test_registry.py', '-q', '-k', 'strips']))\n"
    )
    code, output = finish(tmp_path / "log", run_script, tmp_path / "page.py", ROOT)
    assert code == 0, output
    assert output.startswith(printed)
    assert re.search(r"\d+ passed", output) or "[100%]" in output


def commands(page: str) -> Iterator[list[str]]:
    """The words of each shell command of a page, its inline commands that start with tokamix included."""
    text = "\n".join(block.text for block in blocks(page, "bash"))
    lines = text.replace("\\\n", " ").splitlines()
    lines += re.findall(r"(?<!`)`(tokamix [a-z]+ --?\w[^`]*)`(?!`)", (ROOT / page).read_text())
    for line in lines:
        words = shlex.split(line, comments=True)
        if words:
            yield words[words.index("|") + 1 :] if "|" in words else words


@pytest.mark.parametrize("page", [p for p in PAGES if any(True for _ in commands(p))])
def test_commands_exist(page: str) -> None:
    """Commands of tokamix parse, with every option; recipes, models, scripts, make targets and extras exist."""
    for words in commands(page):
        check_command(words)


def check_command(words: list[str]) -> None:
    if words[0] in ("torchrun", "accelerate", "srun"):
        assert "tokamix" in words, words
        words = words[words.index("tokamix") :]
    elif words[0] == "python" and words[1:3] == ["-m", "tokamix"]:
        words = words[2:]
    if words[0] == "tokamix":
        check_tokamix(words[1:])
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words[0] == "python":
        assert words[1] == "-m" or (ROOT / words[1]).is_file(), words
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for name in re.findall(r"\[([\w,]+)\]", " ".join(words)):
            assert set(name.split(",")) <= extras.keys(), words


def check_tokamix(words: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    name, *arguments = words
    assert name in group.commands, f"there is no command tokamix {name}"
    if "..." in arguments or "--help" in arguments:
        return
    context = group.commands[name].make_context(name, list(arguments))  # raises on unknown options
    recipe, model = context.params.get("recipe"), context.params.get("model")
    if recipe and not recipe.endswith(".yaml"):
        assert recipe in list_recipes(), words
    if model and model != "NAME" and not model.startswith("runs/"):  # a run's folder
        assert timm.is_model(model), words


@pytest.mark.parametrize("page", ["models", "weights"])
def test_generated_tables_are_current(page: str) -> None:
    script = runpy.run_path(str(ROOT / "docs" / "_scripts" / f"{page}.py"))
    current = script["PAGE"].read_text()
    assert script["fill"](current) == current, f"docs/{page}.md is out of date: python docs/_scripts/{page}.py"


def test_deploy_page_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/deploy.md is what benchmarks/deploy.py writes from results/."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.chdir(ROOT)
    deploy: Any = importlib.import_module("deploy")
    monkeypatch.setattr(deploy, "PAGE", tmp_path / "deploy.md")
    deploy.write_page()
    assert (tmp_path / "deploy.md").read_text() == (ROOT / "docs/deploy.md").read_text()


def test_benchmark_page_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/benchmarks.md is what benchmarks/report.py writes from results/ and docs/benchmarks.in.md."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    report: Any = importlib.import_module("report")

    (tmp_path / "benchmarks.in.md").write_text((ROOT / "docs/benchmarks.in.md").read_text())
    monkeypatch.setattr(report, "DOCS", tmp_path)
    report.main()
    assert (tmp_path / "benchmarks.md").read_text() == (ROOT / "docs/benchmarks.md").read_text()


def test_links_of_files_outside_the_site() -> None:
    """Relative links of the pages that are read on a code host lead to files."""
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md"):
        targets = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text())
        missing = [target for target in targets if not ((ROOT / page).parent / target).exists()]
        assert not missing, f"{page}: {missing}"


def test_versions_and_names_agree() -> None:
    """CITATION.cff, pyproject.toml and pre-commit state the same versions; all environment variables are listed."""
    import tokamix

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == tokamix.__version__
    assert len(citation["references"]) == 5
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (ruff,) = (r.partition("==")[2] for r in project["optional-dependencies"]["dev"] if r.startswith("ruff=="))
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks["repos"][0]["rev"] == f"v{ruff}"
    sources = [*(ROOT / "tokamix").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    used = {name for path in sources for name in re.findall(r"\bTOKAMIX_[A-Z]+\b", path.read_text())}
    listed = set(re.findall(r"\bTOKAMIX_[A-Z]+\b", (ROOT / "docs/environment.md").read_text()))
    assert used == listed


def test_every_body_and_mixer_is_in_the_guide() -> None:
    text = (ROOT / "docs/guides/swap.md").read_text()
    assert not [name for name in (*BODIES, *list_mixers()) if f"`{name}`" not in text]


def test_site_builds_strictly(tmp_path: Path) -> None:
    """Broken links, missing anchors, pages outside the navigation and unresolved API names are errors."""
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "site/index.html").is_file()
    options = (tmp_path / "site/guides/cli/index.html").read_text()
    assert "<code>classify</code>, <code>segment</code>, <code>detect</code>" in options, "the values of --task"
    external = re.findall(
        r"<(?:script|link)[^>]+(?:src|href)=\"(https?://[^\"]+)", (tmp_path / "site/index.html").read_text()
    )
    assert not external  # nothing is fetched from elsewhere
