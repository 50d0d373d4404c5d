"""The documentation, followed to the letter."""

import re
import subprocess
import sys
from pathlib import Path

from tokamix.models._registry import sizes

ROOT = Path(__file__).parent.parent


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_readme() -> None:
    """The five lines run, and the model table is what `tokamix models` says."""
    (lines,) = blocks("README.md", "python")
    scope: dict[str, object] = {}
    exec(lines, scope)
    assert scope["logits"].shape == (1, 10)
    assert len(scope["maps"]) == 4
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == 30
    for name, parameters, macs in rows:
        assert (parameters, macs) == tuple(f"{n:.2f}" for n in (sizes(name)[0] / 1e6, sizes(name)[1] / 1e9))


def test_swap_page() -> None:
    for block in blocks("docs/guides/swap.md", "python"):
        exec("import timm, tokamix\n" + block.replace("pretrained=True", "pretrained=False"), {})


def test_add_a_mixer() -> None:
    """The page's code prints what the page says, and the tests of every mixer take the new one up."""
    mixer, use = blocks("docs/guides/add-a-mixer.md", "python")
    (printed,) = blocks("docs/guides/add-a-mixer.md", "text")
    assert len(mixer.splitlines()) <= 30
    check = "import pytest; sys.exit(pytest.main(['tests/mixers/test_registry.py', '-q', '-k', 'strips']))"
    # in a process of its own: a registered mixer stays registered
    run = subprocess.run(
        [sys.executable, "-c", f"{mixer}\n{use}\nimport sys; sys.stdout.flush(); {check}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith(printed)
    assert re.search(r"\d+ passed", run.stdout) or "[100%]" in run.stdout
