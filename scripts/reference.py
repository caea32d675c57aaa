#!/usr/bin/env python3
"""Writes docs/reference/cli/: a page for each command, with all of its settings, from `rlhf schema`.

    scripts/reference.py PROGRAM            writes the pages
    scripts/reference.py PROGRAM --check    compares; exit code 1 if a page differs

PROGRAM is the built `rlhf`. Standard library only.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs/reference/cli"
NOTE = "<!-- Written by scripts/reference.py from `rlhf schema`. -->\n"
INDEX = """{note}
# Commands

`rlhf COMMAND -h` shows the settings used most, `rlhf COMMAND --help` all of them, and `rlhf schema COMMAND` prints them
[as JSON](../schema.md). A setting is a flag, `--learning_rate 1e-5`, and a line of the file that `--config` names,
`learning_rate: 1e-5`; the flag wins over the file.

| command | |
|---|---|
{rows}
"""


def cell(text):
    """Text for a cell of a table. What looks like a tag is code."""
    text = re.sub(r"(?<!`)(<[A-Za-z][^>`]*>)(?!`)", r"`\1`", text)
    return text.replace("|", "\\|").replace("\n", " ")


def code(value):
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float) and (0 < abs(value) < 1e-3 or abs(value) >= 1e6):
        # As people write it: 1e-5, 3.5e-6.
        digits, exponent = f"{value:e}".split("e")
        return f"`{digits.rstrip('0').rstrip('.')}e{int(exponent)}`"
    if isinstance(value, list):
        return f"`{' '.join(map(str, value))}`" if value else ""
    if isinstance(value, dict):
        return f"`{json.dumps(value)}`"
    return f"`{value}`"


def kind(setting):
    """The type in words: `integer, or none`."""
    if setting["choices"]:
        words = "one of " + ", ".join(f"`{choice['name']}`" for choice in setting["choices"])
    else:
        words = {"json": "JSON object"}.get(setting["type"], setting["type"])
    words = f"list: {words}" if setting["list"] else words
    return f"{words}, or `none`" if setting["optional"] else words


def default(setting):
    if setting["required"]:
        return "required"
    text = "" if setting["default"] is None else code(setting["default"])
    presets = {}
    for preset, value in setting["preset_defaults"].items():
        presets.setdefault(code(value), []).append(f"`{preset}`")
    return "; ".join([text or "none", *(f"{value} with {', '.join(names)}" for value, names in presets.items())])


def name(setting):
    shown = f"`{setting['name'].upper()}`" if setting["positional"] else f"`--{setting['name']}`"
    aliases = ", ".join(f"`--{alias}`" for alias in setting["aliases"])
    return f"{shown}<br>or {aliases}" if aliases else shown


def page(command):
    lines = [NOTE, f"# rlhf {command['name']}", "", f"{command['about'].rstrip('.')}.", ""]
    headings = {}
    for setting in command["settings"]:
        if not setting["hidden"]:
            headings.setdefault(setting["heading"] or "Arguments", []).append(setting)
    for heading, settings in headings.items():
        lines += [f"## {heading}", "", "| setting | description | type | default |", "|---|---|---|---|"]
        for setting in settings:
            lines.append(f"| {name(setting)} | {cell(setting['help'])} | {cell(kind(setting))} | {cell(default(setting))} |")
        lines.append("")
    return "\n".join(lines)


def pages(program):
    schema = json.loads(subprocess.run([program, "schema"], check=True, capture_output=True, text=True).stdout)
    commands = schema["commands"]
    rows = "\n".join(f"| [`rlhf {command['name']}`]({command['name']}.md) | {cell(command['about'])} |" for command in commands)
    return {"index.md": INDEX.format(note=NOTE, rows=rows), **{f"{command['name']}.md": page(command) for command in commands}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="PROGRAM")
    parser.add_argument("--check", action="store_true", help="compare with the files in place of writing them")
    options = parser.parse_args()
    made = pages(options.program)
    there = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
    if options.check:
        differ = sorted(file for file in made.keys() | there.keys() if made.get(file) != there.get(file))
        for file in differ:
            print(f"docs/reference/cli/{file}: expected what `scripts/reference.py {options.program}` writes, found another text")
        return 1 if differ else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file in there.keys() - made.keys():
        (FOLDER / file).unlink()
    for file, text in made.items():
        (FOLDER / file).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
