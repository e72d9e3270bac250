"""Take the pictures of a report's sections for the documentation: ``python docs/report_pictures.py REPORT.html``.

First the report of the demo, then the sections that it does not have: ``RANKS.html ranks`` of a run of
``tests/support/straggling_ranks.py`` as two processes with ``slow=1``, and ``SNAPSHOT.html snapshots`` of the file that
``tests/support/trained_snapshot.py`` writes, and ``estimate.html memory`` that ``lightning-memprof estimate`` writes,
and ``trial.html remedies`` of ``lightning-memprof try``, and ``RUN.html`` with ``holders``, ``workers`` or ``hangs`` of
the programs in the guides of these names.
With section names after the report, only those sections are taken. Record in a neutral directory: the pictures show
paths and the host name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

TARGET = Path(__file__).parent / "images"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
WIDTH, HEIGHT = 1200, 900
# Longer sections are cut at this height.
MOST_HEIGHT = 1000
DARK = frozenset({"memory"})


def main(report: str, *only: str) -> None:
    """Write ``report-SECTION.png`` for all sections, or for those named, and ``report.png`` of the top of the page.

    Those of ``estimate.html`` are ``estimate-SECTION.png``, and so with ``trial.html``.
    """
    address = Path(report).absolute().as_uri()
    prefix = Path(report).stem if Path(report).stem in {"estimate", "trial"} else "report"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=list(FLAGS)
        )
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
            page.goto(address)
            page.wait_for_timeout(1500)
            page.evaluate("for (const fold of document.querySelectorAll('.fold')) fold.open = true")
            if scheme == "light" and not only:
                page.screenshot(path=TARGET / "report.png")
            sections = page.query_selector_all("main section")
            for section in sections[1:] or sections:
                name = section.get_attribute("id") or ""
                if (name in DARK) != (scheme == "dark") or (only and name not in only):
                    continue
                section.scroll_into_view_if_needed()
                page.wait_for_timeout(1500)
                box = section.bounding_box()
                if box is not None:
                    top = box["y"] + page.evaluate("scrollY")
                    height = min(box["height"], MOST_HEIGHT)
                    page.screenshot(
                        path=TARGET / f"{prefix}-{name}.png",
                        full_page=True,
                        clip={"x": box["x"], "y": top, "width": box["width"], "height": height},
                    )
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
