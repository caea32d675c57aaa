#!/usr/bin/env python3
"""Licences of all that is linked into the program, as one text for its packages.

    scripts/notices.py [FILE]       writes to FILE, or to standard output

The crates are those that `cargo metadata` names for a build of the program on Linux; the texts are the files in their sources, those
of C libraries inside them too. A text that several crates have is written once. Standard library only.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
LICENCE = re.compile(r"(?i)(licen[cs]e|copying|copyright|notice|unlicense)([-._].*)?$")
# Files with such names that are code.
CODE = (".rs", ".py", ".c", ".h", ".sh", ".json", ".toml", ".html", ".hbs")
# In a crate's folder, those of its tests and examples are not linked.
UNUSED = {"tests", "test", "examples", "benches", "fuzz", "doc", "docs", "target"}

HEAD = """\
The program `rlhf` is licensed under MIT or Apache-2.0, at your option: see LICENSE-MIT and LICENSE-APACHE.
It is linked with the following, under the licences given here. libtorch is not part of this package.
"""


class Missing(Exception):
    """Something that is needed for the notices is not there."""


@dataclass
class Part:
    """Something that is linked: a crate, a standard library, templates of a header."""

    name: str
    licence: str
    texts: list[str]


def metadata(target: str) -> dict[str, Any]:
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", target]
    # Offline, unless crates are missing.
    for options in (["--offline"], []):
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout)
            return found
    raise Missing(f"cargo metadata failed: {(done.stderr.strip().splitlines() or ['it printed no reason'])[-1]}")


def linked(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The packages that the program is linked with, by their names and versions: no build scripts, no tests."""
    nodes = {node["id"]: node for node in found["resolve"]["nodes"]}
    packages = {package["id"]: package for package in found["packages"]}
    waiting = [key for key, package in packages.items() if package["name"] == "rlhf-cli" and package["source"] is None]
    seen: set[str] = set()
    while waiting:
        key = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        normal = (each["pkg"] for each in nodes[key]["deps"] if any(kind["kind"] is None for kind in each["dep_kinds"]))
        # What a procedural macro is made of runs at build time.
        waiting += [each for each in normal if not is_macro(packages[each])]
    return {f"{packages[key]['name']} {packages[key]['version']}": packages[key] for key in seen if packages[key]["source"]}


def is_macro(package: dict[str, Any]) -> bool:
    return any("proc-macro" in target["kind"] for target in package["targets"])


def texts_of(folder: Path) -> list[str]:
    """The texts of the licence files of a crate, those of libraries inside it too."""
    found: dict[str, None] = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts[:-1]
        if LICENCE.match(path.name) and path.suffix not in CODE and not UNUSED & set(inside) and path.is_file():
            text = "\n".join(line.rstrip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()).strip()
            if text:
                found[text] = None
    return list(found)


def crate(name: str, package: dict[str, Any]) -> Part:
    texts = texts_of(Path(package["manifest_path"]).parent)
    licence = package["license"] or "see its text"
    if not texts:
        authors = ", ".join(package["authors"]) or f"the authors of {package['name']}"
        texts = [
            f"{package['repository'] or package['name']}: copyright {authors}. The crate has no file with its licence, {licence};\n"
            "the texts of MIT and Apache-2.0 are those of LICENSE-MIT and LICENSE-APACHE, but for the line of the copyright."
        ]
    return Part(name, licence, texts)


def standard_library() -> Part:
    root = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    place = Path(root) / "share/doc/rust"
    files = [place / name for name in ("COPYRIGHT", "LICENSE-MIT")]
    texts = [file.read_text(encoding="utf-8").strip() for file in files if root and file.is_file()]
    return Part("the Rust standard library", "MIT OR Apache-2.0", texts or ["Copyright The Rust Project Developers (rust-lang.org)."])


def torch() -> Part:
    text = (ROOT / "scripts/notices-torch.txt").read_text(encoding="utf-8").strip()
    return Part("templates of libtorch's headers", "BSD-3-Clause", [text])


def parts() -> list[Part]:
    crates: dict[str, dict[str, Any]] = {}
    for target in TARGETS:
        crates.update(linked(metadata(target)))
    return [crate(name, crates[name]) for name in sorted(crates)] + [standard_library(), torch()]


def written(found: list[Part]) -> str:
    """The list of parts, then each text once with the names of those that have it."""
    owners: dict[str, list[str]] = {}
    for part in found:
        for text in part.texts:
            owners.setdefault(text, []).append(part.name)
    width = max(len(part.name) for part in found)
    blocks = [HEAD + "\n" + "\n".join(f"  {part.name:{width}}  {part.licence}" for part in found)]
    for text, names in sorted(owners.items(), key=lambda item: item[1]):
        blocks.append(f"{'=' * 100}\n{', '.join(dict.fromkeys(names))}\n{'=' * 100}\n\n{text}")
    return "\n\n\n".join(blocks) + "\n"


def main(arguments: list[str]) -> int:
    if len(arguments) > 1 or arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0 if arguments[0] in ("-h", "--help") else 2
    try:
        text = written(parts())
    except (Missing, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments:
        Path(arguments[0]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
