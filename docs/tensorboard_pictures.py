"""Take the documentation's pictures of TensorBoard's tabs: ``python docs/tensorboard_pictures.py ADDRESS RUN...``.

ADDRESS is that of a TensorBoard on the runs. For each RUN, a name as the profiler tab lists it,
the views that no RUN before it has are taken; ``memprof``, ``timeseries`` and ``custom_scalars`` stand for other tabs.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

TARGET = Path(__file__).parent / "images"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
WIDTH, HEIGHT = 1400, 900
PATIENCE_MS = 120_000
PLUGIN = "data/plugin/pytorch_profiler"
TABS = frozenset({"memprof", "timeseries", "custom_scalars"})
SELECT = "//li[contains(@class, 'MuiListSubheader')][normalize-space()='{}']/following::*[@aria-haspopup='listbox'][1]"
LABELS = {"Kernel": "GPU Kernel"}


def main(address: str, runs: list[str]) -> None:
    """Write ``tensorboard_NAME.png`` for each view and tab."""
    address = address.partition("#")[0].rstrip("/")
    taken = set[str]()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=list(FLAGS)
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        for run in runs:
            if run in TABS:
                page.goto(f"{address}/#{run}")
                if run == "custom_scalars":
                    draw_as_it_is(page)
                save(page, run)
                continue
            page.goto(f"{address}/{PLUGIN}/index.html")
            choose(page, "Runs", run)
            for view in views(address, run):
                if view not in taken:
                    taken.add(view)
                    choose(page, "Views", LABELS.get(view, view))
                    save(page, view.lower())
        browser.close()


def views(address: str, run: str) -> list[str]:
    """Return the views that the profiler tab has of a run."""
    url = f"{address}/{PLUGIN}/views?{urllib.parse.urlencode({'run': run})}"
    with urllib.request.urlopen(url) as answer:  # noqa: S310 a TensorBoard of our own
        found: list[str] = json.load(answer)
    return found


def choose(page: Any, label: str, wanted: str) -> None:
    """Choose in one of the tab's lists."""
    page.locator("xpath=" + SELECT.format(label)).click(timeout=PATIENCE_MS)
    page.get_by_role("option", name=wanted, exact=True).click(timeout=PATIENCE_MS)


def draw_as_it_is(page: Any) -> None:
    """Have the curves drawn without smoothing, and with their outliers."""
    smoothing = page.locator("input[type=number]")
    smoothing.fill("0", timeout=PATIENCE_MS)
    smoothing.press("Enter")
    # Last: it fits the charts to what they draw.
    page.wait_for_timeout(2_000)
    page.get_by_text("Ignore outliers in chart scaling").click()


def save(page: Any, name: str) -> None:
    """Write the picture, once everything is drawn."""
    page.wait_for_timeout(15_000 if name == "trace" else 6_000)
    page.screenshot(path=TARGET / f"tensorboard_{name}.png")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
