"""The page in a real browser: it is drawn, it is hovered over and zoomed into, light and dark."""

import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from PIL import Image

from loopwright.report import write_comparison, write_report
from report.folders import LABELS, RESULT, finished_run, make_run, records, served, write_lines

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium: apt-get install chromium"),
]

# What a hand would do: hover over the middle of the first chart, then drag over a part of it.
HAND = """
<script>
const svg = document.querySelector("svg.chart"), box = svg.getBoundingClientRect();
const at = (kind, share) => svg.dispatchEvent(new PointerEvent(kind, {clientX: box.left + share * box.width,
  clientY: box.top + 40, bubbles: true, cancelable: true}));
at("pointermove", 0.5);
const tip = document.querySelector(".tip:not([hidden])").textContent;
at("pointerdown", 0.3); at("pointermove", 0.7); at("pointerup", 0.7);
const zoomed = Boolean(document.querySelector(".reset"));
document.querySelector(".reset").click();
const back = !document.querySelector(".reset");
document.body.setAttribute("data-result", JSON.stringify({tip, zoomed, back}));
</script>
"""


def browse(*argv: str) -> str:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout


@pytest.fixture
def run(tmp_path) -> Path:
    return finished_run(tmp_path / "run-1", metrics=records(resumed_at=20))


def test_the_charts_answer_a_hover_and_a_drag(run):
    page = write_report(run)
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{HAND}</body>"), encoding="utf-8")
    drawn = browse("--window-size=1200,900", "--dump-dom", page.as_uri())
    assert "&quot;zoomed&quot;:true" in drawn and "&quot;back&quot;:true" in drawn
    assert "update 20training  0.1" in drawn


@pytest.mark.parametrize("width", [1200, 400])
def test_the_page_is_not_wider_than_the_window(run, width):
    page = write_report(run)
    # Headless chromium has no window narrower than 500: the page is put into a frame.
    frame = f'<body style="margin:0"><iframe src="{page.name}" style="width:{width}px;height:900px;border:0"></iframe>'
    script = (
        "<script>onload = () => document.body.setAttribute('data-wide', "
        "document.querySelector('iframe').contentDocument.documentElement.scrollWidth)</script>"
    )
    outer = page.with_name("outer.html")
    outer.write_text(frame + script, encoding="utf-8")
    drawn = browse("--window-size=1300,1000", "--allow-file-access-from-files", "--dump-dom", outer.as_uri())
    assert f'data-wide="{width}"' in drawn


def test_the_page_is_light_or_dark_as_the_reader_prefers(run, tmp_path):
    page = write_report(run)
    brightness = []
    for scheme in ("1", "0"):
        shot = tmp_path / f"{scheme}.png"
        scheme_flag = f"--blink-settings=preferredColorScheme={scheme}"
        browse(scheme_flag, "--window-size=1200,1600", f"--screenshot={shot}", page.as_uri())
        with Image.open(shot) as image:
            corner = image.convert("L").getpixel((5, 5))
            num_colours = len(image.convert("RGB").resize((300, 400)).getcolors(1 << 20))
        brightness.append(corner)
        assert num_colours > 30
    assert brightness[0] > 230 and brightness[1] < 40


def test_a_served_page_follows_the_run_without_being_loaded_again(run):
    write_lines(run / "metrics.jsonl", records(20))
    with served(run) as server:
        asked = threading.Event()
        page = server.page

        def counted() -> bytes:
            content = page()
            asked.set()
            return content

        server.page = counted
        growing = threading.Thread(target=lambda: asked.wait(60) and write_lines(run / "metrics.jsonl", records(40)))
        growing.start()
        drawn = browse("--virtual-time-budget=12000", "--dump-dom", server.url)
        growing.join()
    assert '"x":[10,20,30,40]' in drawn


def test_several_runs_are_drawn_side_by_side(run, tmp_path):
    other = make_run(tmp_path / "run-2", labels=LABELS, result=RESULT, metrics=records(20))
    page = write_comparison([run, other], tmp_path / "both.html")
    drawn = browse("--dump-dom", page.as_uri())
    assert drawn.count('class="line') >= 10 and "2 runs side by side" in drawn
