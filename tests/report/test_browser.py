"""The page in a real browser: it plays, searches, explains; light, dark, on a phone; and asks nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.harness import ROOT
from tests.harness.browser import Page, find_browser, open_browser
from tests.harness.clusters import job
from toffee_dist import load_run
from toffee_dist.batch.pipeline import start_run
from toffee_dist.demo import make_graph
from toffee_dist.report import gather, sample
from toffee_dist.report.serve import Door, PageServer

PICTURES = ROOT / "build" / "pictures"
# An id that would do harm in a page that believed it.
EVIL = "<img src=x onerror=\"document.title='evil'\">'</script>"
COLOURS = """
const {data} = document.getElementById("map").getContext("2d").getImageData(0, 0, map.width, map.height)
const found = new Set()
for (let i = 0; i < data.length; i += 4) {
  if (data[i + 3]) found.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2])
}
return found.size
"""

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.job]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    edges, _ = make_graph()
    named = [pl.col(name).replace("person-007", EVIL) for name in ("source", "target")]
    edges.with_columns(named).write_parquet(folder / "edges.parquet")
    settings: dict[str, Any] = {"step": "6h", "undirected": True, "trajectory_by": "filter", "report": True}
    run = start_run(job(folder / "edges.parquet", folder / "out", **settings)).run
    return run.path / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    found = find_browser()
    if found is None:
        pytest.skip("no Chromium with its driver here (Debian: chromium, chromium-driver)")
    with open_browser(*found) as page:
        yield page


@pytest.fixture
def page(browser: Page, report: Path) -> Iterator[Page]:
    """Open the report again, paused; afterwards nothing was complained of, or asked for from anywhere."""
    browser.emulate(prefers_reduced_motion="reduce", prefers_color_scheme="light")
    browser.resize(1200, 900)
    browser.open(report)
    yield browser
    assert browser.console() == []
    assert browser.requests() == [report.as_uri()]
    assert browser.driver.title.startswith("Run ")


def state(page: Page, what: str) -> Any:
    return page.script(f"return toffee.state.{what}")


def chosen(page: Page) -> list[str]:
    found: list[str] = page.script("return toffee.state.chosen.map((track) => track.name)")
    return found


def press(page: Page, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(page.driver).send_keys(*keys).perform()


def pointer(page: Page, node: str) -> Any:
    """Put the mouse on a node of the map."""
    from selenium.webdriver import ActionChains

    x, y = page.script("return toffee.place(arguments[0])", node)
    actions = ActionChains(page.driver)
    actions.w3c_actions.pointer_action.move_to_location(round(x), round(y))  # type: ignore[no-untyped-call]
    return actions


def test_it_draws_everything(page: Page) -> None:
    titles = [element.text for element in page.find("h2")]
    wanted = ["Nodes in time", "What this is", "Rhythms", "Fit by frequency"]
    assert titles == [*wanted, "Time and memory", "Settings and versions"]
    assert "every 7.0 days" in page.find("body")[0].text
    assert len(page.find("svg.chart")) >= 2
    assert page.script("return toffee.tracks.time.length") == 240
    page.wait(lambda: page.script(COLOURS) > 20)
    page.picture(PICTURES / "report.png")
    assert (PICTURES / "report.png").stat().st_size > 50_000


def test_the_slider_and_the_keys_move_time(page: Page) -> None:
    labels = page.script("return toffee.scene.time.labels")
    assert (labels[0], len(labels)) == ("Mon 2026-01-05 00:00", 224)
    page.script("slider.value = 30; slider.dispatchEvent(new Event('input'))")
    assert page.find("#when")[0].text == labels[30] == "Mon 2026-01-12 12:00"
    press(page, "\ue014")
    assert page.find("#when")[0].text == labels[31]
    press(page, "\ue012", "\ue012")
    assert state(page, "at") == 29
    press(page, "\ue010")
    assert state(page, "at") == 223
    press(page, "\ue011")
    assert state(page, "at") == 0
    page.find("#next")[0].click()
    assert state(page, "at") == 1
    # Nodes are elsewhere at another step, in other communities.
    places = [page.script("toffee.go(arguments[0]); return toffee.place('person-042')", at) for at in (2, 22)]
    assert places[0] != places[1]


def test_it_plays_and_pauses(page: Page) -> None:
    assert state(page, "playing") is False  # Who prefers less motion presses the button.
    page.find("#play")[0].click()
    page.wait(lambda: state(page, "at") > 1.5)
    assert "Pause" in page.find("#play")[0].text
    page.script("document.activeElement.blur()")
    press(page, " ")
    assert state(page, "playing") is False
    at = state(page, "at")
    assert at == round(at)
    press(page, "\ue010")
    page.find("#play")[0].click()  # At the end it begins again.
    page.wait(lambda: 0 < state(page, "at") < 100)
    press(page, "\ue00c")


def test_it_plays_by_itself_where_motion_is_welcome(page: Page) -> None:
    page.emulate(prefers_reduced_motion="no-preference")
    page.driver.refresh()
    page.wait(lambda: page.script("return window.toffee != null"))
    page.wait(lambda: state(page, "at") > 0.5)
    page.script("toffee.play(false)")
    address = page.driver.current_url
    assert page.requests() == [address, address]
    page.driver.refresh()


def test_the_strip_goes_to_a_moment(page: Page) -> None:
    from selenium.webdriver import ActionChains

    [strip] = page.find("#strip")
    ActionChains(page.driver).move_to_element_with_offset(strip, 0, 10).click().perform()
    assert abs(state(page, "at") - 112) <= 2


def test_the_mouse_on_a_node_tells_about_it(page: Page) -> None:
    pointer(page, EVIL).perform()
    said = page.wait(lambda: page.find("#tip")[0].text)
    assert EVIL in said
    for word in ("degree", "last seen", "2026-03-01", "community"):
        assert word in said


def test_a_click_chooses_a_node_and_lets_it_go(page: Page) -> None:
    press(page, "\ue00c")
    assert chosen(page) == []
    pointer(page, "person-042").click().perform()
    page.wait(lambda: chosen(page) == ["person-042"])
    assert page.find("#note")[0].text == "person-042 is chosen."
    assert "Who makes its vector" in page.find("#picked")[0].text or "degree" in page.find("#picked")[0].text
    pointer(page, "person-042").click().perform()
    page.wait(lambda: chosen(page) == [])


def test_search_finds_explains_and_draws_a_trail(page: Page) -> None:
    from selenium.webdriver import Keys

    press(page, "\ue00c", "/")
    press(page, "PERSON-04")
    page.wait(lambda: [item.text for item in page.find("#hits li")][:2] == ["person-040", "person-041"])
    press(page, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)
    page.wait(lambda: chosen(page) == ["person-041"])
    page.script("search.value = ''; search.focus()")
    press(page, EVIL, Keys.ENTER)
    page.wait(lambda: chosen(page) == ["person-041", EVIL])
    page.script("toffee.go(40)")
    explained = page.script("return Object.keys(toffee.scene.why).map((at) => toffee.scene.ids[at])")
    assert len(explained) == 150
    page.script("search.value = ''; search.focus()")
    press(page, explained[3], Keys.ENTER)
    page.wait(lambda: explained[3] in chosen(page))
    said = page.find(".chosen")[0].text
    for words in ("Who makes its vector", "Rhythms of its movement", "every 7.0 days", "Who made that move"):
        assert words in said
    # A neighbour's name leads to the neighbour.
    link = page.find(".chosen .link")[0]
    name = link.text
    link.click()
    page.wait(lambda: name in chosen(page))
    page.picture(PICTURES / "chosen.png", "#player", "#player")


def test_search_for_a_stranger_says_so(page: Page) -> None:
    from selenium.webdriver import Keys

    before = chosen(page)
    page.script("search.focus()")
    press(page, "<b>nobody</b>", Keys.ENTER)
    said = "<b>nobody</b> is not among the 240 nodes on this page."
    page.wait(lambda: page.find("#note")[0].text == said)
    assert chosen(page) == before


def test_colours_and_the_view_over_all_time(page: Page) -> None:
    from selenium.webdriver.support.select import Select

    for label, words in (
        ("degree", "How many others"),
        ("last seen", "was last seen"),
        ("community", "Communities"),
    ):
        Select(page.find("#colour")[0]).select_by_visible_text(label)
        assert words in page.find("#key")[0].text
    page.find(".groups button")[2].click()
    assert state(page, "lit") == 2
    Select(page.find("#view")[0]).select_by_visible_text("over all time")
    assert state(page, "view") == "all"
    page.script("document.activeElement.blur()")
    press(page, "\ue014")  # A step is a step: back in time.
    assert state(page, "view") == "time"


def test_light_and_dark(page: Page) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    assert page.script(paper) == "rgb(255, 255, 255)"
    page.find("#theme")[0].click()
    assert page.script(paper) == "rgb(21, 23, 27)"
    page.picture(PICTURES / "dark.png", "#player", "#player")
    page.find("#theme")[0].click()
    assert page.script(paper) == "rgb(255, 255, 255)"
    page.script("delete document.documentElement.dataset.theme")
    page.emulate(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    assert page.script(paper) == "rgb(21, 23, 27)"


def test_a_phone(page: Page) -> None:
    page.resize(360, 740)
    page.wait(lambda: page.script("return map.clientWidth") < 360)
    assert page.script("return document.documentElement.scrollWidth") <= 360
    for element in page.find("#play, #slider, #search, #map, #strip, #theme"):
        assert element.is_displayed()
        assert element.rect["x"] >= 0
        assert element.rect["x"] + element.rect["width"] <= 360
    sizes = page.script(
        "return [...document.querySelectorAll('p, td, th, button, select')]"
        ".map((e) => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12
    page.find("#next")[0].click()
    assert state(page, "at") == 1
    page.picture(PICTURES / "phone.png")


def test_live(browser: Page, report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from selenium.webdriver import Keys

    run = load_run(report.parent)
    # The page has few nodes, the server all of them.
    monkeypatch.setattr(
        gather, "choose_nodes", lambda nodes, seed: sample.choose_nodes(nodes, seed, count=60)
    )
    server = PageServer(run, Door())
    shown = server.answers.facts.nodes
    assert shown is not None
    stranger = next(name for name in run.nodes.polars().collect()["node_id"] if name not in shown.ids)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        browser.emulate(prefers_reduced_motion="reduce")
        browser.resize(1200, 900)
        browser.requests()
        browser.visit(server.url)
        assert browser.driver.current_url == f"{server.origin}/"
        browser.script("toffee.go(40); search.focus()")
        press(browser, stranger, Keys.ENTER)
        browser.wait(lambda: chosen(browser)[-1] == stranger)
        browser.wait(lambda: browser.script("return toffee.state.answered") == stranger)
        assert browser.script("return toffee.state.chosen.at(-1).xy.length") == 2 * 224
        assert len(browser.script("return toffee.place(arguments[0])", stranger)) == 2
        said = browser.find(".chosen")[0].text
        for words in (
            "Nearest at",
            "Which links made its vector at",
            "Which rhythms",
            "Compared with",
            "cosine",
        ):
            assert words in said
        expected = run.neighbors(stranger, 8, at=40)["node_id"].to_list()
        assert all(name in said for name in expected)
        browser.script("search.value = ''; search.focus()")
        press(browser, "nobody-at-all", Keys.ENTER)
        browser.wait(lambda: "unknown node" in browser.find("#note")[0].text)
        browser.picture(PICTURES / "live.png", "#player", "#player")
        assert {url.partition("?")[0].removeprefix(server.origin) for url in browser.requests()} <= {
            "/",
            *(f"/api/{name}" for name in ("find", "node", "neighbors", "explain", "compare")),
        }
        # The one complaint is of the stranger.
        assert all("404" in line for line in browser.console())
        # Without the cookie of this browser there is nothing.
        browser.driver.delete_all_cookies()
        assert browser.script("return fetch('/api/find?text=p').then((answer) => answer.status)") == 401
        browser.console()
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
