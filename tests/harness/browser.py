"""A real browser without a window, for the pages that we write: Chromium, driven by its own driver.

`python -m tests.harness.browser docs/report.png` makes the picture of the README.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WAIT = 60.0
# Bokeh's inputs live in shadow trees, where selectors of the page do not look.
_FIND = """
const found = []
const look = (root) => {
  found.push(...root.querySelectorAll(arguments[0]))
  for (const element of root.querySelectorAll("*")) if (element.shadowRoot) look(element.shadowRoot)
}
look(document)
return found
"""


def find_browser() -> tuple[str, str] | None:
    """Return Chromium and its driver, where both are installed."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    return None if browser is None or driver is None else (browser, driver)


class Page:
    """A page in a browser, and what a person does with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        """Load a file and wait until Bokeh has drawn all of it."""
        self.driver.get(path.absolute().as_uri())
        self.wait(lambda: self.script("return window.Bokeh != null && Bokeh.documents.length > 0"))
        self.wait(lambda: self.script("return Bokeh.documents[0].is_idle"))

    def script(self, text: str, *arguments: Any) -> Any:
        """Run a script in the page."""
        return self.driver.execute_script(text, *arguments)

    def wait(self, done: Callable[[], Any]) -> Any:
        """Wait until something is so, at most a minute; return it."""
        until = time.monotonic() + WAIT
        while True:
            found = done()
            if found:
                return found
            assert time.monotonic() < until, "the page did not get there"
            time.sleep(0.05)

    def find(self, selector: str) -> list[Any]:
        """Return elements anywhere in the page."""
        found: list[Any] = self.script(_FIND, selector)
        return found

    def console(self) -> list[str]:
        """Return what the browser complained of since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return every address outside the page that was asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        urls = [event["request"]["url"] for event in sent]
        return [url for url in urls if not url.startswith(("data:", "blob:", "chrome"))]

    def picture(self, path: Path, first: str = "html", last: str = "html") -> None:
        """Write the page as a PNG, from the top of one element to the end of another."""
        script = "return document.querySelector(arguments[0]).getBoundingClientRect()[arguments[1]] + scrollY"
        top, bottom = self.script(script, first, "top"), self.script(script, last, "bottom")
        clip = {
            "x": 0,
            "y": top,
            "width": self.script("return innerWidth"),
            "height": bottom - top,
            "scale": 1,
        }
        options = {"captureBeyondViewport": True, "clip": clip}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def open_browser(browser: str, driver: str, *, dark: bool = False) -> Iterator[Page]:
    """Start a browser of its own, which keeps nothing and asks nobody."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for word in (
            "headless=new",
            "no-sandbox",  # Containers run as root, where Chromium's sandbox does not start.
            "disable-dev-shm-usage",
            "disable-gpu",
            "disable-background-networking",
            "no-first-run",
            "hide-scrollbars",
            "window-size=1120,900",
            f"user-data-dir={profile}",
            "app=about:blank",
            *(["force-dark-mode"] if dark else []),
        ):
            options.add_argument(f"--{word}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        running = webdriver.Chrome(options, Service(driver))
        try:
            running.set_page_load_timeout(WAIT)
            running.set_script_timeout(WAIT)
            yield Page(running)
        finally:
            running.quit()


def main(out: Path) -> None:
    """Run the demonstration and take a picture of the map and of a trajectory in its report."""
    from PIL import Image

    from toffee_dist.demo import run_demo
    from toffee_dist.progress import Progress
    from toffee_dist.results.run import load_run

    found = find_browser()
    if found is None:
        sys.exit("No Chromium with its driver here. On Debian: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory() as folder, open_browser(*found) as page:
        run_demo(Path(folder) / "demo", lambda line: None, Progress())
        page.open(load_run(Path(folder) / "demo" / "vectors").path / "report.html")
        page.picture(out, "section:nth-of-type(2)", "section:nth-of-type(3)")
    # A plot has few colours: with a palette the file is a third as large.
    Image.open(out).convert("RGB").quantize(128).save(out, optimize=True)
    print(f"{out}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
