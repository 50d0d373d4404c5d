"""The documentation, followed to the letter."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def test_add_a_mixer() -> None:
    """The page's code prints what the page says, and the tests of every mixer take the new one up."""
    mixer, use = blocks("add-a-mixer.md", "python")
    (printed,) = blocks("add-a-mixer.md", "text")
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
