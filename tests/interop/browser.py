"""Opens reports of `rlhf report`, and the live page of `rlhf watch`, in headless Chromium.

    python3 tests/interop/browser.py target/release/rlhf

Trains a tiny model with PPO, adds hostile samples, and checks in the browser: no error on the console, nothing requested, the last
values of the curves equal `metrics.jsonl`, texts of the samples are shown as text, alarms are marked, hovering and sorting work. The
live page gets new updates and samples without being loaded again: scroll position, open details and choices stay. Prints one line per
check; exit code 1 if any failed. With SCREENSHOTS=FOLDER the live page is also written there as PNG. Without Chromium (`apt-get install chromium`) it prints that it was skipped.

Needs the standard library only.
"""

import html
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# Nothing is left beside the sources.
sys.dont_write_bytecode = True
import chromium  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/models"
HOSTILE = [
    "<script>document.title = 'owned'</script>",
    '</pre></article><img src=x onerror="document.title=1">',
    "\"'><svg onload='document.title=2'> &lt;b&gt; ]]> <!--",
    "שלום עולם, مرحبا",
    "👩\u200d🚀 東京 e\u0301",
    "a" * 100_000,
]
# The result of a call, long enough to be folded.
RESULT = HOSTILE[0] * 20

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
    marks: all(document, "svg.chart .mark").map(mark => mark.querySelector("title").textContent),
    alarms: all(document, ".alarms dd").map(line => line.textContent),
    overflow: document.documentElement.scrollWidth - innerWidth,
    resources: performance.getEntriesByType("resource").map(entry => entry.name),
  };
  const shown = selector => all(document, selector).map(part => part.checkVisibility());
  const turns = () => [shown(".turns .read"), shown(".turns .tokens"), shown(".turns .inserted")].map(parts => [...new Set(parts)]);
  result.folded = all(document, "article .turns details.result").map(details => [details.open, details.querySelector("pre").textContent]);
  result.turns = turns();
  document.querySelector(".show-shades").click();
  result.shaded = turns();
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
    call = {"type": "function", "function": {"name": "<b>f", "arguments": {"text": HOSTILE[0]}}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "name": "<b>f", "content": RESULT}, {"role": "assistant", "content": "ok"}]
    tokens = {"tokens": ["call", RESULT, "ok"], "logprobs": [-1.0, 0.0, -0.5], "response": f"call{RESULT}ok", "inserted": [1, 2]}
    samples += json.dumps({"step": 3, "prompt": "turns", **tokens, "score": 9, "messages": turns, "tool_calls": 1, "tool_failures": 0, "env_reward": 1.0}) + "\n"
    (run / "samples/eval-000003.jsonl").write_text(samples)
    alarm = {"step": 2, "alarm": "runaway_kl", "message": "update 2: the policy <b>left</b> its start; a lower learning_rate keeps it near"}
    (run / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    return run


def visit(browser, page, width):
    """Opens a page with the probe. Returns the probe's result and the browser's messages of the console."""
    probed = page.with_name(f"probed-{width}.html")
    probed.write_text(page.read_text().replace("</body>", PROBE))
    with tempfile.TemporaryDirectory() as profile:
        ran = subprocess.run(
            [browser, *chromium.FLAGS, "--enable-logging=stderr", f"--user-data-dir={profile}", f"--window-size={width},900", "--virtual-time-budget=5000", "--dump-dom",
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
    expect(f"{width} pixels: title", result["title"] == "run <b>1&2: rlhf ppo", result["title"])
    expect(f"{width} pixels: no element comes from a sample", result["foreign"] == 0, result["foreign"])
    expect(f"{width} pixels: hostile texts are shown", all(text in result["texts"] for text in HOSTILE[:-1]), result["texts"])
    expect(f"{width} pixels: a long result of a tool is folded, as text", result["folded"] == [[False, RESULT]], result["folded"])
    switched = [result["turns"], result["shaded"]] == [[[True], [False], [False]], [[False], [True], [True]]]
    expect(f"{width} pixels: shades show the tokens of turns in place of their texts", switched, (result["turns"], result["shaded"]))
    expect(f"{width} pixels: a long text is cut with a note", "98800 more characters are left out." in result["notes"], result["notes"])
    labelled = result["charts"] > 10 and result["unlabelled"] == 0
    expect(f"{width} pixels: all {result['charts']} charts have a title and a description", labelled)
    alarms = ["the policy <b>left</b> its start", "To try: a lower learning_rate keeps it near"]
    marked = result["marks"] and set(result["marks"]) == {"runaway_kl at update 2"} and result["alarms"] == alarms
    expect(f"{width} pixels: an alarm is marked and explained", marked, (result["marks"], result["alarms"]))
    expect(f"{width} pixels: nothing is wider than the window", result["overflow"] <= 0, result["overflow"])
    expect(f"{width} pixels: nothing is requested", result["resources"] == [], result["resources"])
    arranged = result["worst"] == sorted(result["worst"]) and result["found"] == 1
    expect(f"{width} pixels: samples are sorted and searched", arranged, result)


# The state of the live page, and what a reader has set in it.
STATE = """({
  progress: document.getElementById("progress").textContent,
  live: document.getElementById("live").textContent,
  score: Number(document.querySelector('data[data-metric="objective/scores"]').value),
  steps: document.querySelector("svg.chart path[data-x]").dataset.x,
  same: window.first === document.querySelector("svg.chart"),
  open: document.querySelector("#configuration details").open,
  shades: document.querySelector("#show-each").checked,
  order: document.getElementById("order").value,
  worst: [...document.querySelectorAll("article")].map(article => article.dataset.score).filter(score => score !== "").map(Number),
  scroll: scrollY,
  top: Math.round(document.getElementById("p0-0").getBoundingClientRect().top),
  prompts: [...document.querySelectorAll("article pre.prompt")].map(pre => pre.textContent),
  foreign: document.querySelectorAll("article script, article img, article svg").length,
  overflow: document.documentElement.scrollWidth - innerWidth,
  loads: performance.getEntriesByType("navigation").length,
})"""


def check_live(rlhf, browser, run, width):
    """Opens the live page, adds to the run, and looks at what changes and what stays."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    watch = subprocess.Popen([rlhf, "watch", run], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        url = watch.stdout.readline().strip()
        with chromium.Page(browser, width, 900) as page:
            page.open(url)
            expect(f"live, {width} pixels: connected", page.wait("document.getElementById('live').textContent.startsWith('Live')"))
            page.run("""{
              window.first = document.querySelector("svg.chart");
              document.querySelector("#configuration details").open = true;
              document.querySelector("#show-each").click();
              const order = document.getElementById("order");
              order.value = "worst";
              order.dispatchEvent(new Event("input"));
              document.getElementById("p0-0").scrollIntoView();
            }""")
            before = page.run(STATE)
            last = json.loads(lines[-1])
            newest = {**last, "step": last["step"] + 1, "objective/scores": 0.123456789}
            with open(run / "metrics.jsonl", "a") as file:
                file.write(json.dumps(newest) + "\n")
            changed = page.wait(f"{STATE}.score === 0.123456789")
            after = page.run(STATE)
            expect(f"live, {width} pixels: a new update appears", changed, after)
            expect(f"live, {width} pixels: in the curves", after["steps"].split()[-1] == str(newest["step"]), after["steps"])
            moved = abs(after["top"] - before["top"])
            expect(f"live, {width} pixels: what is read stays where it is", before["scroll"] > 0 and moved <= 2, (before, after))
            rows = [json.dumps({"step": newest["step"], "prompt": text, "response": text, "score": -99}) + "\n" for text in HOSTILE[:2]]
            (run / f"samples/answers-{newest['step']:06}.jsonl").write_text("".join(rows))
            changed = page.wait(f"{STATE}.worst.filter(score => score === -99).length === 2")
            after = page.run(STATE)
            expect(f"live, {width} pixels: new samples appear, sorted", changed and after["worst"] == sorted(after["worst"]), after)
            expect(f"live, {width} pixels: as text", after["foreign"] == 0 and HOSTILE[0] in after["prompts"], after)
            kept = [(name, before[name], after[name]) for name in ("same", "open", "shades", "order") if before[name] != after[name]]
            expect(f"live, {width} pixels: open details and choices stay", kept == [] and after["same"] and after["open"], kept)
            expect(f"live, {width} pixels: nothing is wider than the window", after["overflow"] <= 0, after["overflow"])
            expect(f"live, {width} pixels: no message on the console", page.console == [], page.console)
            if "SCREENSHOTS" in os.environ:
                page.run("scrollTo(0, 0)")
                (Path(os.environ["SCREENSHOTS"]) / f"live-{width}.png").write_bytes(page.screenshot())
            watch.terminate()
            watch.wait()
            ended = page.wait("document.getElementById('live').textContent.startsWith('The server does not answer')")
            expect(f"live, {width} pixels: the end of the server is reported", ended)
    finally:
        watch.kill()
        watch.wait()
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def main():
    browser = chromium.find()
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
        for width in (1280, 390):
            check_live(rlhf, browser, run, width)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
