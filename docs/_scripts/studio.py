"""Take the screenshot of docs/guides/studio.md. Needs playwright and chromium.

python docs/_scripts/studio.py
"""

import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tokamix.studio import StudioSettings, start_studio

FILE = Path(__file__).parents[1] / "studio.png"
VIEW = "?photo=temple&pictures=mixing_row,receptive_field,sampled_positions,super_token_regions&layer=6&token=0.4,0.3"
SIZE = {"width": 1180, "height": 1010}


def main() -> None:
    app = start_studio(StudioSettings(port=0, device="cpu"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, device_scale_factor=1.5)
        page.goto(app.local_url + VIEW)
        page.wait_for_selector(".board .tint", timeout=120_000)
        page.wait_for_timeout(2000)  # progress bars disappear
        page.screenshot(path=FILE)
        browser.close()
    app.close(verbose=False)
    Image.open(FILE).convert("RGB").quantize(256, Image.Quantize.MEDIANCUT).save(FILE, optimize=True)
    print(FILE, FILE.stat().st_size)


if __name__ == "__main__":
    main()
