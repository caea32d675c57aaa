"""Draws the curves of the committed results as an SVG: the mean score and the KL of every PPO update, three seeds.

    python3 plot.py             writes docs/images/sentiment.svg
    python3 plot.py --check     compares it; exit code 1 if it differs

Reads results/seed-N/ppo.metrics.jsonl. Python 3.9 or newer, standard library only.
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
IMAGE = HERE.parent.parent / "docs" / "images" / "sentiment.svg"

WIDTH, HEIGHT = 880, 330
TOP, PLOT_HEIGHT, PLOT_WIDTH = 70, 190, 350

# (key, title, left edge in pixels, ticks of the vertical axis)
PANELS = [
    ("objective/scores", "Mean reward-model score", 62, [-2, 0, 2, 4]),
    ("objective/kl", "KL to the SFT model, nats per response", 500, [0, 1, 2, 3]),
]

# The page of GitHub may be light or dark; the image has a background of its own in both.
STYLE = """
  .background { fill: #ffffff; stroke: #d0d7de }
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 }
  .grid { stroke: #d0d7de }
  .seed-1 { stroke: #0969da } .seed-2 { stroke: #bc4c00 } .seed-3 { stroke: #1a7f37 }
  .curve { fill: none; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    .background { fill: #0d1117; stroke: #3d444d }
    text { fill: #f0f6fc }
    .grid { stroke: #3d444d }
    .seed-1 { stroke: #4493f8 } .seed-2 { stroke: #f0883e } .seed-3 { stroke: #3fb950 }
  }
"""


def curves(key):
    """Seed -> the values of `key`, one per update."""
    found = {}
    for path in sorted(HERE.glob("results/seed-*/ppo.metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.parent.name] = [row[key] for row in rows if key in row]
    return found


def text(x, y, words, anchor="middle", kind=""):
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def panel(key, title, left, ticks):
    """The lines of SVG of one plot: title, grid, axes, one curve per seed."""
    low, high = ticks[0], ticks[-1]
    found = curves(key)
    updates = max(map(len, found.values()))

    def y_of(value):
        return round(TOP + PLOT_HEIGHT * (high - value) / (high - low), 1)

    def x_of(update):
        return round(left + PLOT_WIDTH * (update - 1) / (updates - 1), 1)

    lines = [text(left, TOP - 16, title, "start", "title")]
    for tick in ticks:
        y = y_of(tick)
        lines.append(f'<line class="grid" x1="{left}" y1="{y}" x2="{left + PLOT_WIDTH}" y2="{y}"/>')
        lines.append(text(left - 8, y + 4, f"{tick:+d}" if low < 0 and tick else tick, "end"))
    for update in [1, *range(8, updates + 1, 8)]:
        lines.append(text(x_of(update), TOP + PLOT_HEIGHT + 20, update))
    lines.append(text(left + PLOT_WIDTH / 2, TOP + PLOT_HEIGHT + 40, "update (64 responses each)"))
    for seed, values in found.items():
        points = " ".join(f"{x_of(at)},{y_of(value)}" for at, value in enumerate(values, 1))
        lines.append(f'<polyline class="curve {seed}" points="{points}"/>')
    return lines


def legend(seeds):
    lines = []
    for at, seed in enumerate(seeds):
        x = 62 + 96 * at
        lines.append(f'<line class="curve {seed}" x1="{x}" y1="24" x2="{x + 22}" y2="24"/>')
        lines.append(text(x + 28, 28, seed.replace("-", " "), "start"))
    return lines


def draw():
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img">',
        "<title>PPO on examples/sentiment, three seeds: mean score and KL per update</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="background" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        *legend(curves(PANELS[0][0])),
    ]
    for each in PANELS:
        lines += panel(*each)
    return "\n".join(lines + ["</svg>", ""])


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if not IMAGE.is_file() or IMAGE.read_text() != draw():
            sys.exit(f"{IMAGE}: differs from the drawing of the results; run plot.py and look at the difference")
    elif sys.argv[1:]:
        print(__doc__)
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)
    else:
        IMAGE.parent.mkdir(exist_ok=True)
        IMAGE.write_text(draw())
