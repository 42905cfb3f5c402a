"""The review's page in a real browser: no error, nothing fetched, tables that sort, room on a phone, dark and paper."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from review_factory import HOSTILE, evidence, made, material, records

from harness.report.review import document, to_html

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is on the path")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
# What a person does, done by a script at the end of a copy of the page; what it saw stands in the body's attribute.
PROBE = """
<script>
const seen = { owned: document.body.dataset.owned ?? null, width: innerWidth };
const root = document.documentElement;
seen.paper = getComputedStyle(document.body).backgroundColor;
seen.ink = getComputedStyle(document.querySelector(".chart svg text")).fill;
const table = [...document.querySelectorAll("table")].find((t) => t.caption.textContent === "Summary by recipe");
const column = (i) => [...table.tBodies[0].rows].map((row) => row.cells[i].textContent);
const header = table.tHead.rows[0].cells[1];
const button = header.querySelector("button");
seen.sorts = [[header.ariaSort, column(0)]];
seen.button = button.tagName;
for (let i = 0; i < 2; i++) { button.click(); seen.sorts.push([header.ariaSort, column(0)]); }
seen.unsorted = [...document.querySelectorAll("table")].filter((t) => t.tBodies[0].rows.length > 1
  && t.querySelectorAll("th button").length !== t.tHead.rows[0].cells.length).length;
dispatchEvent(new Event("beforeprint"));
seen.folded = document.querySelectorAll("details:not([open])").length;
// The page itself must not scroll sideways, whatever its tables and figures do in their own boxes.
const boxed = ".scroll, .chart, pre, .skip";
seen.wide = [...document.querySelectorAll("body *")].filter((e) => !e.closest(boxed))
  .filter((e) => e.getBoundingClientRect().right > innerWidth).map((e) => e.outerHTML.slice(0, 90));
// Captions stay in sight, at both ends of their tables, which they do not make wider.
seen.captions = { wide: 0, cut: [] };
for (const box of document.querySelectorAll(".scroll")) {
  const caption = box.querySelector("caption span");
  if (!box.offsetParent) continue;
  seen.captions.wide += box.scrollWidth > box.clientWidth;
  for (const place of [0, box.scrollWidth]) {
    box.scrollLeft = place;
    const { left, right, width } = caption.getBoundingClientRect(), edge = box.getBoundingClientRect();
    if (!width || left < edge.left - 1 || right > edge.right + 1) seen.captions.cut.push([caption.textContent, place]);
  }
  box.scrollLeft = 0;
}
seen.scrolls = root.scrollWidth > root.clientWidth;
dispatchEvent(new Event("afterprint"));
parent.postMessage(JSON.stringify(seen), "*");
</script>
"""


# A window is 500 pixels wide at least: a phone's is a frame, which tells what its page saw.
FRAME = """<!doctype html><body style="margin:0"><script>
addEventListener("message", (e) => { document.body.dataset.seen = e.data; });
</script><iframe src="probed.html" style="border:0;width:WIDTHpx;height:2000px"></iframe>
"""
DARK = "--blink-settings=preferredColorScheme=0"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A review with hostile text and names too long for a line, as it is written."""
    long = "a-name-that-goes-on-and-on-" * 5
    odd = [
        made(f"real/{HOSTILE}", "fp8_e4m3", why=HOSTILE, implementation=HOSTILE),
        made(f"x/{long}", "bf16", why=long),
    ]
    path = tmp_path_factory.mktemp("page") / "review.html"
    path.write_text(to_html(document(material([*records(), *odd], evidence()))), encoding="utf-8")
    return path


def _chromium(page: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    profile = page.with_name(f"profile-{page.stem}")
    command = [CHROMIUM, *QUIET, f"--user-data-dir={profile}", *arguments, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    shutil.rmtree(profile, ignore_errors=True)
    return done


def _probed(page: Path, name: str, width: int, *arguments: str) -> dict[str, object]:
    """What PROBE saw in a frame of that width, and a screenshot for people to look at. The copy's policy lets the probe
    run, and forbids the network as the page's own does."""
    text = re.sub(r"script-src '[^']*'", "script-src 'unsafe-inline'", page.read_text(encoding="utf-8"))
    page.with_name("probed.html").write_text(text.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    frame = page.with_name(f"{name}.html")
    frame.write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    shot = frame.with_suffix(".png")
    size = f"--window-size={max(width, 500)},2000"
    done = _chromium(
        frame, "--dump-dom", f"--screenshot={shot}", "--virtual-time-budget=5000", size, *arguments
    )
    assert shot.read_bytes().startswith(b"\x89PNG")
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, done.stderr
    seen: dict[str, object] = json.loads(html.unescape(found[1]))
    return seen


@pytest.fixture(scope="module")
def phone(page: Path) -> dict[str, object]:
    return _probed(page, "phone", 390)


@pytest.fixture(scope="module")
def dark(page: Path) -> dict[str, object]:
    return _probed(page, "dark", 1180, DARK)


def test_the_page_as_it_is_says_nothing_on_the_console_and_prints(page: Path):
    shot, paper = page.with_name("light.png"), page.with_name("paper.pdf")
    files = (f"--screenshot={shot}", f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    done = _chromium(
        page, "--dump-dom", *files, "--window-size=1180,2000", "--enable-logging=stderr", "--v=0"
    )
    assert "CONSOLE" not in done.stderr
    assert 'aria-sort="none"' in done.stdout  # its own script ran under its own policy
    assert "data-owned" not in done.stdout
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert paper.read_bytes().startswith(b"%PDF")


def test_another_script_than_its_own_is_refused(page: Path):
    """The policy holds even where escaping would not."""
    copy = page.with_name("injected.html")
    text = page.read_text(encoding="utf-8")
    injected = "<script>document.body.dataset.owned=1</script></body>"
    copy.write_text(text.replace("</body>", injected), encoding="utf-8")
    done = _chromium(copy, "--dump-dom", "--enable-logging=stderr", "--v=0")
    assert "data-owned" not in done.stdout
    assert "Content Security Policy" in done.stderr


def test_a_header_sorts_its_table_both_ways(phone: dict[str, object]):
    assert phone["sorts"] == [
        ["none", ["bf16", "fp8_e4m3"]],
        ["ascending", ["bf16", "fp8_e4m3"]],
        ["descending", ["fp8_e4m3", "bf16"]],
    ]
    assert phone["button"] == "BUTTON"  # which Tab reaches, and Enter and Space press
    assert phone["unsorted"] == 0


def test_text_from_records_ran_nothing(phone: dict[str, object]):
    assert phone["owned"] is None


def test_a_phone_needs_no_sideways_scrolling(phone: dict[str, object]):
    assert phone["width"] == 390
    assert phone["wide"] == []
    assert not phone["scrolls"]


def test_captions_of_wide_tables_stay_in_sight_on_a_phone(phone: dict[str, object]):
    """They were as wide as their tables, and cut."""
    captions = phone["captions"]
    assert isinstance(captions, dict)
    assert captions["cut"] == []
    assert captions["wide"] > 0


def test_paper_shows_what_is_folded_away(phone: dict[str, object]):
    assert phone["folded"] == 0


def test_dark_is_dark_and_its_figures_too(phone: dict[str, object], dark: dict[str, object]):
    assert (phone["paper"], phone["ink"]) == ("rgb(255, 255, 255)", "rgb(29, 33, 38)")
    assert (dark["paper"], dark["ink"]) == ("rgb(20, 23, 27)", "rgb(227, 230, 234)")
