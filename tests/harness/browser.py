"""A real browser without a window, for the pages that we write: Chromium, driven by its own driver.

`python -m tests.harness.browser docs/report.png docs/report.gif` makes the pictures of the README.
"""

from __future__ import annotations

import base64
import io
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
        """Load a file and wait until its map is drawn."""
        self.visit(path.absolute().as_uri())

    def visit(self, address: str) -> None:
        """Load an address and wait until its map is drawn."""
        self.driver.get(address)
        self.wait(lambda: self.script("return window.toffee != null"))

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
        """Return elements of the page."""
        found: list[Any] = self.driver.find_elements("css selector", selector)
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

    def shot(self, first: str = "html", last: str = "html") -> bytes:
        """Return the page as a PNG, from the top of one element to the end of another."""
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
        return base64.b64decode(shot["data"])

    def picture(self, path: Path, first: str = "html", last: str = "html") -> None:
        """Write the page as a PNG, from the top of one element to the end of another."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.shot(first, last))

    def emulate(self, **features: str) -> None:
        """Pretend that the system prefers something: ``prefers_color_scheme="dark"``."""
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})

    def resize(self, width: int, height: int) -> None:
        """Show the page on a screen of another size, as a phone has it."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


@contextmanager
def open_browser(browser: str, driver: str) -> Iterator[Page]:
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


# The steps of the animation: a week and its weekend, from Thursday on.
FRAMES = range(12, 42)


def main(still: Path, moving: Path) -> None:
    """Run the demonstration, and take a picture and a short animation of its page."""
    from toffee_dist.demo import run_demo
    from toffee_dist.progress import Progress
    from toffee_dist.results.run import load_run

    found = find_browser()
    if found is None:
        sys.exit("No Chromium with its driver here. On Debian: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory() as folder, open_browser(*found) as page:
        run_demo(Path(folder) / "demo", lambda line: None, Progress())
        page.emulate(prefers_reduced_motion="reduce")
        page.open(load_run(Path(folder) / "demo" / "vectors").path / "report.html")
        page.script("toffee.go(arguments[0])", FRAMES[0] + 6)
        time.sleep(0.5)
        page.picture(still, "#controls", ".stage")
        page.resize(900, 900)
        shots = []
        for at in FRAMES:
            for part in (0.0, 0.5):
                page.script("toffee.state.at = arguments[0]; toffee.tell()", at + part)
                time.sleep(0.15)
                shots.append(page.shot("#controls", ".stage"))
    write_pictures(still, moving, shots)


def write_pictures(still: Path, moving: Path, shots: list[bytes]) -> None:
    """Make the still picture small, and an animation of the others."""
    from PIL import Image

    # A page has few colours: with a palette the file is a third as large.
    Image.open(still).convert("RGB").quantize(128).save(still, optimize=True)
    frames = [Image.open(io.BytesIO(shot)).convert("RGB") for shot in shots]
    width = 640
    height = round(frames[0].height * width / frames[0].width)
    small = [frame.resize((width, height), Image.Resampling.LANCZOS) for frame in frames]
    # One palette for all frames, made of some of them: with others, still parts would flicker.
    some = Image.new("RGB", (width, 4 * height))
    for row, frame in enumerate(small[:: max(1, len(small) // 4)][:4]):
        some.paste(frame, (0, row * height))
    palette = some.quantize(96)
    drawn = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in small]
    drawn[0].save(moving, save_all=True, append_images=drawn[1:], duration=140, loop=0, optimize=True)
    for path in (still, moving):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
