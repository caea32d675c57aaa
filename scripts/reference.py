#!/usr/bin/env python3
"""Writes docs/reference/cli/, a page for each command with all of its settings, and the tables of other systems' names in docs/migrate, from
`rlhf schema`.

    scripts/reference.py PROGRAM            writes the pages and the tables
    scripts/reference.py PROGRAM --check    compares; exit code 1 if a page differs

A page of docs/migrate has such a table between the lines `<!-- names: SYSTEM -->` and `<!-- end of names -->`.

PROGRAM is the built `rlhf`. Standard library only.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
FOLDER = DOCS / "reference/cli"
MIGRATE = DOCS / "migrate"
TABLE = re.compile(r"(?<=<!-- names: )([^>\n]+)( -->\n).*?(?=<!-- end of names -->)", re.DOTALL)
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


def prose(text):
    """A text of the table of names, with settings as code."""
    if re.fullmatch(r"[a-z][a-z0-9_]*", text):
        return f"`--{text}`"
    return cell(re.sub(r"(?<![`\w/.])([a-z0-9]+(?:_[a-z0-9]+)+)(?![`\w/.])", r"`\1`", text))


def here(row):
    """The second column of a row of the table of names."""
    meaning, values = row["meaning"], row["values"]
    if meaning == "same":
        text = " and ".join(f"`--{name}`" for name in row["here"].split(" and "))
        if row["unless"]:
            text += f", unless it is {' or '.join(code(value) for value in row['unless'])}"
        return f"{text}, {row['why']}" if row["why"] else text
    if meaning == "words":
        words = {}
        for word, value in values.items():
            words.setdefault(value, []).append(f"`{word}`")
        told = [f"{', '.join(names)} is {code(value)}" if value else f"{', '.join(names)}: as it is" for value, names in words.items()]
        return f"`--{row['here']}`: {'; '.join(told)}" if row["here"] else ", ".join(words[None])
    if meaning == "translated":
        return prose(row["here"])
    if meaning == "no_effect":
        return f"no effect: {prose(row['why'])}"
    if meaning in ("fixed", "noted"):
        fine = ", ".join(f"`{value}`" for value in values if value)
        return f"{fine or '`none`'} only: {prose(row['why'])}" if meaning == "fixed" else f"{fine}; else a note says that there is none"
    if meaning == "hint":
        return prose(row["why"])
    return prose(row["here"]) if row["here"] else f"none: {prose(row['why'])}"


def names_table(rows, system):
    """The table of the names of `system`."""
    of = [row for row in rows if row["system"] == system]
    merged = []
    for row in of:
        key = {**row, "names": []}
        if merged and merged[-1][0] == key:
            merged[-1][1].extend(row["names"])
        else:
            merged.append((key, list(row["names"])))
    with_commands = any(row["commands"] for row in of)
    lines = [f"| {system} | commands | here |", "|---|---|---|"] if with_commands else [f"| {system} | here |", "|---|---|"]
    for row, names in merged:
        cells = [", ".join(f"`{name}`" for name in names), here(row)]
        if with_commands:
            cells.insert(1, "all" if len(row["commands"]) == 7 else ", ".join(row["commands"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def migration(schema):
    """The pages of docs/migrate that have tables of names, with them."""
    rows = schema["names_of_other_systems"]
    found = {}
    for path in sorted(MIGRATE.glob("*.md")):
        text = path.read_text()
        if "<!-- names: " in text:
            found[path] = TABLE.sub(lambda part: f"{part[1]}{part[2]}{names_table(rows, part[1])}", text)
    return found


def pages(schema):
    commands = schema["commands"]
    rows = "\n".join(f"| [`rlhf {command['name']}`]({command['name']}.md) | {cell(command['about'])} |" for command in commands)
    return {"index.md": INDEX.format(note=NOTE, rows=rows), **{f"{command['name']}.md": page(command) for command in commands}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="PROGRAM")
    parser.add_argument("--check", action="store_true", help="compare with the files in place of writing them")
    options = parser.parse_args()
    schema = json.loads(subprocess.run([options.program, "schema"], check=True, capture_output=True, text=True).stdout)
    made = {**{FOLDER / file: text for file, text in pages(schema).items()}, **migration(schema)}
    there = {path: path.read_text() for path in {*FOLDER.glob("*.md"), *made} if path.exists()}
    if options.check:
        differ = sorted(path for path in made.keys() | there.keys() if made.get(path) != there.get(path))
        for path in differ:
            print(f"docs/{path.relative_to(DOCS)}: expected what `scripts/reference.py {options.program}` writes, found another text")
        return 1 if differ else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in there.keys() - made.keys():
        path.unlink()
    for path, text in made.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
