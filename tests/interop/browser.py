"""Opens reports of `rlhf report` in headless Chromium.

    python3 tests/interop/browser.py target/release/rlhf

Trains a tiny model with PPO, adds hostile samples, and checks in the browser: no error on the console, nothing requested, the last
values of the curves equal `metrics.jsonl`, texts of the samples are shown as text, hovering and sorting work. Prints one line per
check; exit code 1 if any failed. Without Chromium (`apt-get install chromium`) it prints that it was skipped.

Needs the standard library only.
"""

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "crates/rlhf/tests/golden/models"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HOSTILE = [
    "<script>document.title = 'owned'</script>",
    '</pre></article><img src=x onerror="document.title=1">',
    "\"'><svg onload='document.title=2'> &lt;b&gt; ]]> <!--",
    "שלום עולם, مرحبا",
    "👩\u200d🚀 東京 e\u0301",
    "a" * 100_000,
]

# Runs in the page, after its own script. Its result is the text of the element `result`.
PROBE = """
<script>
addEventListener("load", () => {
  const all = (of, selector) => [...of.querySelectorAll(selector)];
  const svg = document.querySelector("svg.chart"), box = svg.getBoundingClientRect();
  const at = { clientX: box.right - 1, clientY: box.top + box.height / 2 };
  svg.dispatchEvent(new PointerEvent("pointermove", at));
  const tip = document.getElementById("tip");
  const order = document.getElementById("order"), search = document.getElementById("search");
  const result = {
    title: document.title,
    tip: tip.hidden ? "" : tip.textContent,
    hovered: svg.querySelector("path[data-y]").dataset.y.split(" ").at(-1),
    last: Object.fromEntries(all(document, "data[data-metric]").map(data => [data.dataset.metric, Number(data.value)])),
    ends: all(document, "figure").map(figure => [
      all(figure, "data").map(data => Number(data.value)),
      all(figure, "path[data-y]").map(path => Number(path.dataset.y.split(" ").at(-1)))]),
    foreign: all(document, "article script, article img, article svg, article iframe").length,
    texts: all(document, "article pre").map(pre => pre.textContent),
    notes: all(document, "article .note").map(note => note.textContent),
    unlabelled: all(document, "svg.chart").filter(svg =>
      !svg.querySelector("title").textContent || !svg.querySelector("desc").textContent).length,
    charts: all(document, "svg.chart").length,
    overflow: document.documentElement.scrollWidth - innerWidth,
    resources: performance.getEntriesByType("resource").map(entry => entry.name),
  };
  order.value = "worst";
  order.dispatchEvent(new Event("input"));
  result.worst = all(document, "article").map(article => article.dataset.score).filter(score => score !== "").map(Number);
  search.value = "onload";
  search.dispatchEvent(new Event("input"));
  result.found = all(document, "article:not([hidden])").length;
  const out = document.createElement("pre");
  out.id = "result";
  out.textContent = JSON.stringify(result);
  document.body.append(out);
});
</script>
</body>"""

failures = 0


def expect(name, holds, found=""):
    global failures
    failures += not holds
    print(f"browser: {name}: {'passed' if holds else 'FAILED'}", "" if holds else str(found)[:500])


def train(rlhf, work):
    """Trains for three updates and adds a file of hostile samples; returns the run's folder."""
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in ["The movie", "A film", "do", "is it"])
    (work / "prompts.jsonl").write_text(rows)
    run = work / "run <b>1&2"
    subprocess.run(
        [rlhf, "ppo", "--sft_model_path", GOLDEN / "gpt_neox", "--reward", "length:target=4", "--dataset_name",
         work / "prompts.jsonl", "--output_dir", run, "--response_length", "8", "--per_device_train_batch_size", "4",
         "--total_episodes", "12", "--num_sample_generations", "3", "--value_model_path", GOLDEN / "gpt_neox_cls"],
        check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    samples = "".join(
        json.dumps({"step": 3, "prompt": text, "response": text, "score": score, "components": {text[:40]: score}}) + "\n"
        for score, text in enumerate(HOSTILE)
    )
    (run / "samples/eval-000003.jsonl").write_text(samples)
    return run


def visit(browser, page, width):
    """Opens a page with the probe. Returns the probe's result and the browser's messages of the console."""
    probed = page.with_name(f"probed-{width}.html")
    probed.write_text(page.read_text().replace("</body>", PROBE))
    with tempfile.TemporaryDirectory() as profile:
        ran = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
             f"--user-data-dir={profile}", f"--window-size={width},900", "--virtual-time-budget=5000", "--dump-dom",
             probed.as_uri()],
            capture_output=True, text=True, timeout=120,
        )
    found = re.search(r'<pre id="result">(.*?)</pre>', ran.stdout, re.DOTALL)
    console = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    return (json.loads(html.unescape(found[1])) if found else None), console


def same(drawn, value):
    """Whether a curve ends at a value, in six significant digits."""
    return abs(drawn - value) <= 1e-5 * abs(value)


def check_page(browser, page, metrics, width):
    result, console = visit(browser, page, width)
    expect(f"{width} pixels: no message on the console", console == [], console)
    if result is None:
        return expect(f"{width} pixels: the page's script ran", False)
    last = metrics[-1]
    values = {name: value for name, value in result["last"].items() if not name.startswith("eval/")}
    equal = all(last[name] == value for name, value in values.items())
    expect(f"{width} pixels: last values of {len(values)} curves", len(values) > 15 and equal, values)
    drawn = all(len(ends) == len(values) and all(map(same, ends, values)) for values, ends in result["ends"])
    expect(f"{width} pixels: ends of the drawn curves", drawn, result["ends"])
    hovers = result["tip"].startswith("update 3") and result["hovered"] in result["tip"]
    expect(f"{width} pixels: hovering shows the value", hovers, result["tip"])
    expect(f"{width} pixels: title", result["title"] == "run <b>1&2", result["title"])
    expect(f"{width} pixels: no element comes from a sample", result["foreign"] == 0, result["foreign"])
    expect(f"{width} pixels: hostile texts are shown", all(text in result["texts"] for text in HOSTILE[:-1]), result["texts"])
    expect(f"{width} pixels: a long text is cut with a note", "98800 more characters are left out." in result["notes"], result["notes"])
    labelled = result["charts"] > 10 and result["unlabelled"] == 0
    expect(f"{width} pixels: all {result['charts']} charts have a title and a description", labelled)
    expect(f"{width} pixels: nothing is wider than the window", result["overflow"] <= 0, result["overflow"])
    expect(f"{width} pixels: nothing is requested", result["resources"] == [], result["resources"])
    arranged = result["worst"] == sorted(result["worst"]) and result["found"] == 1
    expect(f"{width} pixels: samples are sorted and searched", arranged, result)


def main():
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("browser: skipped, as Chromium is not installed (apt-get install chromium)")
        return 0
    rlhf = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as work:
        run = train(rlhf, Path(work))
        subprocess.run([rlhf, "report", run], check=True, stdout=subprocess.DEVNULL)
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for width in (1280, 500):
            check_page(browser, run / "report.html", metrics, width)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
