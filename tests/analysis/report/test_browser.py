"""The page of a report in Chromium, where it is installed."""

import pytest

from tests.analysis.report.browser import CHROMIUM, Browser
from tests.analysis.report.sample import HOSTILE

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

OUTLIERS = "document.querySelector('#table-outliers table')"
FIGURE = "document.querySelector('#figure-heads .enlarge')"
DIALOG = "document.querySelector('dialog').open"


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def browser(started, written):
    """Any test ends without a message in the console, and without a request but for the page."""
    started.problems.clear()
    started.requests.clear()
    yield started
    assert started.problems == []
    assert {url for url in started.requests if not url.startswith("data:")} == {
        (written / "report.html").as_uri()
    }


def column(browser, number, table=OUTLIERS):
    return browser.run(f"[...{table}.tBodies[0].rows].map(row => row.cells[{number}].textContent)")


def heading(number, table=OUTLIERS):
    return f"{table}.tHead.rows[0].cells[{number}].firstChild"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_as_wide_as_the_window(browser, written, width, dark):
    browser.open(written / "report.html", width, dark=dark)
    found = browser.run("[document.documentElement.scrollWidth, innerWidth]")
    assert found[0] <= found[1] == width
    # What is wider scrolls within its own box.
    box = "document.querySelector('#table-wide .scroll')"
    assert browser.run(f"{box}.scrollWidth > {box}.clientWidth")


def test_a_click_sorts_by_the_raw_number(browser, written, report):
    browser.open(written / "report.html", 1280)
    frame = next(table for table in report.tables if table.key == "outliers").frame
    place = list(frame).index("median")
    before = column(browser, place)
    orders = {}
    for state in ("ascending", "descending", None):
        browser.click(heading(place))
        assert browser.run(f"{OUTLIERS}.tHead.rows[0].cells[{place}].ariaSort") == state
        orders[state] = column(browser, 0)
    for state in ("ascending", "descending"):
        # The missing one stays at the end.
        wanted = frame.sort_values("median", ascending=state == "ascending", kind="stable")
        assert orders[state] == list(wanted["model"])
    assert orders[None] == list(frame["model"])
    assert column(browser, place) == before


def test_a_key_sorts_names_and_one_column_at_a_time(browser, written):
    browser.open(written / "report.html", 1280)
    browser.click(heading(2))
    browser.run(f"{heading(1)}.focus()")
    browser.press("Enter")
    marked = browser.run(f"[...{OUTLIERS}.tHead.rows[0].cells].map(cell => cell.ariaSort)")
    assert [state for state in marked if state is not None] == ["ascending"]
    activations = column(browser, 1)
    assert activations == sorted(activations)


@pytest.mark.parametrize("width", [1280, 390])
def test_a_figure_enlarges_and_escape_closes_it(browser, written, width):
    browser.open(written / "report.html", width)
    image = "document.querySelector('dialog img')"
    small = browser.run(f"{FIGURE}.firstChild.clientWidth")
    browser.click(FIGURE)
    assert browser.run(DIALOG)
    assert browser.run(f"{image}.complete && {image}.naturalWidth > 0")
    assert browser.run(f"{image}.clientWidth") > small
    assert browser.run("document.querySelector('dialog p').textContent") == browser.run(
        "document.querySelector('#figure-heads .title').textContent"
    )
    browser.press("Escape")
    assert not browser.run(DIALOG)
    assert browser.run(f"document.activeElement === {FIGURE}")
    browser.press("Enter")
    assert browser.run(DIALOG)
    browser.click("document.querySelector('dialog button')")
    assert not browser.run(DIALOG)


@pytest.mark.parametrize("dark", [False, True])
def test_the_button_turns_the_colours(browser, written, dark):
    browser.open(written / "report.html", 1280, dark=dark)
    colours = "['backgroundColor', 'color'].map(n => getComputedStyle(document.documentElement)[n])"
    first = browser.run(colours)
    name = "document.querySelector('.theme').textContent"
    assert browser.run(name) == ("Light colours" if dark else "Dark colours")
    browser.click("document.querySelector('.theme')")
    assert browser.run(name) == ("Dark colours" if dark else "Light colours")
    other = browser.run(colours)
    browser.open(written / "report.html", 1280, dark=not dark)
    assert browser.run(colours) == other != first


def test_hostile_names_are_harmless_and_shown(browser, written, report):
    browser.open(written / "report.html", 1280)
    assert column(browser, 0, "document.querySelector('#table-models table')")[-5:] == list(HOSTILE)
    assert browser.run("document.scripts.length") == 1
    images = "[...document.querySelectorAll('figure img')].map(image => image.naturalWidth > 0)"
    assert browser.run(images) == [True] * len(report.figures)
    assert HOSTILE[0] in browser.run("document.querySelector('footer code').textContent")
    # Even what would be written unescaped could not run.
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=lost=1>')")
    script = "Object.assign(document.createElement('script'), {text: 'lost = 1'})"
    browser.run(f"document.body.append({script})")
    assert browser.run("typeof lost") == "undefined"
    assert browser.problems
    assert all("Content Security Policy" in problem for problem in browser.problems)
    browser.problems.clear()


def test_every_control_has_a_name(browser, written):
    browser.open(written / "report.html", 390)
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    controls = [
        node for node in tree
        if not node["ignored"] and node["role"]["value"] in ("button", "link", "image", "region")
    ]  # fmt: skip
    assert len(controls) > len(HOSTILE)
    assert all(node["name"]["value"] for node in controls)


def test_nothing_is_cut_off_in_print(browser, written):
    browser.open(written / "report.html", 1280)
    browser.call("Emulation.setEmulatedMedia", media="print")
    # The printed width of A4 upright and across, at 96 pixels an inch.
    for width, tables in ((680, ":not(.across)"), (1032, ".across")):
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
            mobile=False,
        )  # fmt: skip
        query = f"[...document.querySelectorAll('figure.table{tables} table')]"
        found = browser.run(f"{query}.map(table => table.getBoundingClientRect().right)")
        assert found
        assert max(found) <= width
    assert browser.run("getComputedStyle(document.querySelector('.theme')).display") == "none"
    browser.call("Emulation.setEmulatedMedia", media="")
