"""The pages in a browser, headless Chromium: they load without errors, and the controls do what they say."""

import json
import re
import shutil
import subprocess

import jax.random as jr
import numpy as np
import pytest

from ddnf import DDNF
from ddnf.viz.view import frames, page
from ddnf_paper import report
from ddnf_paper.experiment import run
from tests.paper.test_report import experiment

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium (on Debian: apt-get install chromium)")

# Put before all else on a page: what goes wrong is kept. And the browser's virtual time, in which twenty seconds take
# one, runs ahead of the frames it draws: here they follow it.
WATCH = """<script>
window.faults = [];
window.addEventListener("error", (event) => faults.push(event.message));
window.addEventListener("unhandledrejection", (event) => faults.push(String(event.reason)));
window.addEventListener("securitypolicyviolation", (event) => faults.push("blocked: " + event.blockedURI));
console.error = console.warn = (...words) => faults.push(words.join(" "));
window.requestAnimationFrame = (step) => setTimeout(() => step(performance.now()), 40);
window.cancelAnimationFrame = clearTimeout;
</script>"""
# Put after all else: STEPS fill `found`, which comes back with the page as JSON.
DRIVE = """<script>
(async () => {
  const find = (selector) => document.querySelector(".flow-view " + selector);
  const canvas = find("canvas"), slider = find(".slider"), found = {};
  const wait = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
  const picture = () => {
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let sum = 0;
    for (let i = 0; i < data.length; i++) sum = (sum * 31 + data[i]) >>> 0;
    return sum;
  };
  const ink = () => {
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return data.reduce((count, value, i) => count + (i % 4 === 3 && value > 0), 0);
  };
  const set = (control, value) => {
    control.value = value;
    for (const event of ["input", "change"]) control.dispatchEvent(new Event(event));
  };
  const toggle = (name) => find(`[name=${name}]`).click();
  try { STEPS } catch (error) { faults.push(String(error)); }
  found.faults = faults;
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
})();
</script>"""


def drive(path, steps, *, fragment="", options=()):
    """What the steps found on a page, after all their time has passed."""
    text = path.read_text("utf-8").replace("<head>", "<head>" + WATCH, 1)
    before, end, after = text.rpartition("</body>")
    driven = path.with_name("driven.html")
    driven.write_text(before + DRIVE.replace("STEPS", steps) + end + after, "utf-8")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom", *options]
    command = [BROWSER, *words, f"--user-data-dir={path.parent / 'browser'}", driven.as_uri() + fragment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result = re.search(r'<pre id="result">(.*)</pre>', done.stdout, re.DOTALL)
    assert result is not None, done.stderr[-2000:]
    return json.loads(result[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.fixture(scope="module")
def view_page(tmp_path_factory):
    def flow(dim):
        return DDNF(jr.key(2), dim, blocks=2, steps=2, hidden=(4,), output_scale=1.5)

    path = tmp_path_factory.mktemp("view") / "page.html"
    plane = frames(flow(2), labels=["a <b>", "b"], count=9, particles=100)
    path.write_text(page({"plane": plane, "space": frames(flow(3), count=9, particles=100)}, "Two flows"), "utf-8")
    return path


def test_the_slider_moves_everything(view_page):
    found = drive(
        view_page,
        """
        found.reading = [find(".reading").textContent, slider.getAttribute("aria-valuetext")];
        found.start = canvas.getAttribute("aria-label");
        for (const shown of ["grid", "density", "particles"]) {
          for (const other of ["grid", "density", "particles"]) if (other !== shown) toggle(other);
          set(slider, 0); const start = picture();
          set(slider, 0.6); const middle = picture();
          set(slider, 0.6); const again = picture();
          set(slider, 1); const end = picture();
          set(slider, 0); const back = picture();
          found[shown] = [start !== middle, middle === again, middle !== end, start === back];
          for (const other of ["grid", "density", "particles"]) if (other !== shown) toggle(other);
        }
        const full = ink();
        ["grid", "density", "particles"].forEach(toggle);
        found.less = ink() < full / 5;
        found.label = canvas.getAttribute("aria-label");
        """,
    )
    assert found["faults"] == []
    assert found["reading"] == ["time 0.00 · flow, block 1 of 2"] * 2
    assert found["start"] == "plane, a <b> and b, at time 0.00: density, grid, particles"
    for shown in ("grid", "density", "particles"):
        assert found[shown] == [True] * 4, shown
    assert found["less"] and found["label"].endswith("nothing")


def test_a_page_with_rows_opens_on_the_fit(tmp_path):
    flow = DDNF(jr.key(2), 2, blocks=1, steps=2, hidden=(4,))
    rows = np.random.default_rng(0).normal(size=(50, 2))
    path = tmp_path / "page.html"
    shown = frames(flow, rows=rows, count=5, particles=50)
    path.write_text(page({"plane": shown}, "A fit", "Points and <crosses>."), "utf-8")
    found = drive(
        path,
        """
        found.label = canvas.getAttribute("aria-label");
        found.caption = document.querySelector(".caption").textContent;
        const full = ink();
        ["density", "particles"].forEach(toggle);
        const crosses = ink();
        toggle("data");
        found.ink = [full > crosses, crosses > ink()];
        """,
    )
    assert found["faults"] == [] and found["caption"] == "Points and <crosses>."
    assert found["label"] == "plane, z[0] and z[1], at time 1.00: density, particles, data"
    assert found["ink"] == [True, True]


def test_play_goes_there_and_back_and_pause_holds(view_page):
    found = drive(
        view_page,
        """
        const button = find(".play"), times = [];
        found.before = [button.textContent, button.getAttribute("aria-pressed")];
        button.click();
        found.during = [button.textContent, button.getAttribute("aria-pressed")];
        for (let i = 0; i < 24; i++) { await wait(0.5); times.push(Number(slider.value)); }
        button.click();
        const held = slider.value;
        await wait(1);
        Object.assign(found, {times, held: held === slider.value, after: button.textContent});
        """,
    )
    assert found["faults"] == []
    assert (found["before"], found["during"], found["after"]) == (["Play", "false"], ["Pause", "true"], "Play")
    times = found["times"]
    top = times.index(max(times))
    assert max(times) > 0.95 and times[:top] == sorted(times[:top]) and min(times[top:]) < 0.5
    assert len(set(times)) > 10 and found["held"]


def test_flows_and_pairs_can_be_chosen(view_page):
    found = drive(
        view_page,
        """
        const pairs = find(".pairs"), choice = find(".pairs select"), flows = find(".flows select");
        found.start = [time(), pairs.hidden, find(".note").textContent];
        set(flows, "space");
        found.pairs = [pairs.hidden, ...[...choice.options].map((option) => option.text)];
        const first = picture();
        set(choice, "1,2");
        found.moved = first !== picture();
        found.note = find(".note").textContent;
        found.wide = document.documentElement.scrollWidth <= window.innerWidth;
        found.named = [...document.querySelectorAll("input, select")].every((control) => control.labels.length === 1);
        function time() { return Number(slider.value); }
        """,
        fragment="#t=0.5",
        options=["--window-size=500,800"],
    )
    assert found["faults"] == []
    assert found["start"] == [0.5, True, ""]
    assert found["pairs"] == [False, "z[0], z[1]", "z[0], z[2]", "z[1], z[2]"]
    assert found["moved"] and "projection" in found["note"] and found["wide"] and found["named"]


def test_reduced_motion_is_respected(view_page):
    found = drive(
        view_page,
        """
        const times = new Set();
        find(".play").click();
        for (let i = 0; i < 60; i++) { await wait(0.2); times.add(Number(slider.value)); }
        found.times = [...times].sort();
        """,
        options=["--force-prefers-reduced-motion"],
    )
    assert found["faults"] == []
    assert 3 < len(found["times"]) <= 9 and all(time * 8 % 1 == 0 for time in found["times"])


def test_the_report_works_in_a_browser(tmp_path):
    run(experiment(), tmp_path, profile="smoke")
    path = report.write(tmp_path, experiments={"fake": experiment(), "missing": experiment("missing")})
    found = drive(
        path,
        """
        set(slider, 0); const start = picture();
        set(slider, 1);
        found.moved = start !== picture();
        found.images = [...document.images].every((image) => image.complete && image.naturalWidth > 100 && image.alt);
        found.anchors = [...document.querySelectorAll("nav a")].every((link) => document.querySelector(link.hash));
        found.wide = document.documentElement.scrollWidth <= window.innerWidth;
        """,
        options=["--window-size=500,800"],
    )
    assert found["faults"] == []
    assert found["moved"] and found["images"] and found["anchors"] and found["wide"]
