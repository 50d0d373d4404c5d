"""Every tab, in light and dark colours and at the width of a phone: axe-core finds nothing serious."""

from collections.abc import Callable
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.browser.conftest import DESKTOP, PHONE, open_tab

# tab -> what to click there, so that everything it can show is on the page, and what appears then
TABS = {
    "Look": ("", ""),
    "Compare": ("text=Measure on this machine", "#measure"),
    "Train": ("text=Start a run", "#start"),
    "Detect and segment": ("#dense-sample", "#dense-result img"),
}


def violations(page: Any) -> list[str]:
    """Findings of axe-core that keep people from using the page."""
    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for rule in found
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_no_serious_findings(open_page: Callable[..., Any], look: str) -> None:
    page = open_page(viewport=PHONE if look == "phone" else DESKTOP, color_scheme="dark" if look == "dark" else "light")
    found = []
    for name, (opened, appears) in TABS.items():
        open_tab(page, name)
        if opened:
            page.locator(opened).click()
            page.locator(appears).wait_for()
            page.wait_for_timeout(300)  # of a fade
        found += [f"{name}: {text}" for text in violations(page)]
        if look == "phone":
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], f"{name} scrolls sideways"
    assert not found, "\n".join(found)
