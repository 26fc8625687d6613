"""The report in a real browser: it draws, hovers, searches, colours, shows trajectories, and asks nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.harness import ROOT
from tests.harness.browser import Page, find_browser, open_browser
from tests.harness.clusters import job
from toffee_dist.batch.pipeline import start_run
from toffee_dist.demo import make_graph

PICTURES = ROOT / "build" / "pictures"
# An id that would do harm in a page that believed it.
EVIL = "<img src=x onerror=\"document.title='evil'\">'</script>"
# Where a node is in the window, after scrolling the map into it.
PLACE = """
const model = (name) => Bokeh.documents[0].get_model_by_name(name)
const find = (view) => view.model === model("map") ? view : (view.child_views ?? []).map(find).find(Boolean)
const view = [...Bokeh.index].map(find).find(Boolean)
view.el.scrollIntoView({block: "center"})
const {left, top} = view.el.getBoundingClientRect()
const {data} = model("nodes")
const at = data.id.indexOf(arguments[0])
return [left + view.frame.x_scale.compute(data.x[at]), top + view.frame.y_scale.compute(data.y[at])]
"""
WIDTHS = """
const figures = (view) => view.model.type == "Figure" ? [view] : (view.child_views ?? []).flatMap(figures)
return [...Bokeh.index].flatMap(figures).map((view) => view.frame.bbox.width)
"""

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.job]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    edges, _ = make_graph()
    named = [pl.col(name).replace("person-007", EVIL) for name in ("source", "target")]
    edges.with_columns(named).write_parquet(folder / "edges.parquet")
    settings: dict[str, Any] = {"step": "6h", "undirected": True, "freqs": "auto", "report": True}
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
    """Open the report afresh; afterwards nothing was complained of, or asked for from anywhere."""
    browser.open(report)
    yield browser
    assert [line for line in browser.console() if ' "[bokeh ' not in line] == []
    assert browser.requests() == [report.as_uri()]
    assert browser.driver.title.startswith("Run ")


def model(page: Page, name: str, what: str) -> Any:
    """Return something of a Bokeh model of the page."""
    return page.script(f"return Bokeh.documents[0].get_model_by_name('{name}').{what}")


def pointer(page: Page, node: str) -> Any:
    """Put the mouse on a node of the map."""
    from selenium.webdriver import ActionChains

    x, y = page.script(PLACE, node)
    actions = ActionChains(page.driver)
    actions.w3c_actions.pointer_action.move_to_location(round(x), round(y))  # type: ignore[no-untyped-call]
    return actions


def search(page: Page, text: str) -> None:
    from selenium.webdriver import Keys

    [field] = page.find("input.bk-input")
    field.clear()
    field.send_keys(text, Keys.ENTER)


def test_it_draws_everything(page: Page) -> None:
    titles = [element.text for element in page.find("h2")]
    wanted = ["What this is", "Map of nodes", "Trajectory of the chosen node", "Rhythms", "Fit by frequency"]
    assert titles == [*wanted, "Time and memory", "Settings and versions"]
    drawn = page.script(WIDTHS)
    assert len(drawn) == 6
    assert min(drawn) > 500
    assert "every 7.0 days" in page.find("body")[0].text
    page.picture(PICTURES / "report.png")
    assert (PICTURES / "report.png").stat().st_size > 50_000


def test_the_mouse_on_a_node_tells_about_it(page: Page) -> None:
    pointer(page, EVIL).perform()
    said = page.wait(lambda: " ".join(element.text for element in page.find(".bk-tooltip-content")))
    assert EVIL in said
    for word in ("degree", "last seen", "2026-03-01", "community"):
        assert word in said


def test_a_click_chooses_a_node(page: Page) -> None:
    pointer(page, "person-042").click().perform()
    page.wait(lambda: model(page, "note", "text") == "person-042 is chosen.")


def test_search_centres_and_shows_the_trajectory(page: Page) -> None:
    before = model(page, "path", "data.x")
    ids = model(page, "nodes", "data.id")
    with_path = [name for name, at in zip(ids, model(page, "nodes", "data.path"), strict=True) if at >= 0]
    wanted = EVIL if EVIL in with_path else with_path[-1]
    search(page, wanted)
    page.wait(lambda: model(page, "note", "text") == f"{wanted} is chosen.")
    [at] = model(page, "nodes", "selected.indices")
    assert ids[at] == wanted
    middle = (model(page, "map", "x_range.start") + model(page, "map", "x_range.end")) / 2
    assert middle == pytest.approx(model(page, "nodes", f"data.x[{at}]"))
    after = model(page, "path", "data.x")
    assert len(after) == len(before) == 224
    assert after != before
    page.picture(PICTURES / "chosen.png")


def test_search_for_a_stranger_says_so(page: Page) -> None:
    search(page, "<b>nobody</b>")
    said = "<b>nobody</b> is not among the 240 nodes on this page."
    page.wait(lambda: model(page, "note", "text") == said)
    assert model(page, "nodes", "selected.indices") == []


def test_nodes_can_be_coloured_otherwise(page: Page) -> None:
    from selenium.webdriver.support.select import Select

    [chooser] = page.find("select")
    for label, column in (("degree", "degree"), ("last seen", "seen"), ("community", "community")):
        Select(chooser).select_by_visible_text(label)
        # Bokeh's callbacks run within the event: nothing is waited for.
        assert model(page, "map", "renderers[0].glyph.fill_color.field") == column
        assert model(page, "map", "right.filter((bar) => bar.visible).map((bar) => bar.title)") == [label]
