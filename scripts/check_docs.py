#!/usr/bin/env python3
"""Checks the documentation: the list of pages, their sizes, links and anchors.

    python3 scripts/check_docs.py

One line for each error, `file:line: what, expected, found`, and exit code 1 if there is one. Standard library only.
"""

import re
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SUMMARY = DOCS / "SUMMARY.md"
GENERATED = DOCS / "reference" / "cli"  # pages that a program writes may have any size
PAGE_LIMIT = 16384
README_LIMIT = 6144

FENCE = re.compile(r"\s*(```+|~~~+)")
HEADING = re.compile(r" {0,3}(#{1,6})\s+(.*?)\s*#*\s*$")
# The target of [text](target), ![text](target) and [text](target "title"). The text may be on an earlier line.
LINK = re.compile(r"\]\(\s*<?([^()\s<>]+(?:\([^()\s]*\)[^()\s<>]*)*)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r" {0,3}\[[^\]^]+\]:\s+<?(\S+?)>?\s*$")
HTML_ANCHOR = re.compile(r"<[a-z]+[^>]*\s(?:id|name)=\"([^\"]+)\"")
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")

errors = []


def error(path, line, text):
    errors.append((str(path.relative_to(ROOT)), line, text))


def prose(text):
    """The lines outside of code blocks, with their numbers; indented code is a block too, if a blank line is before it."""
    fence, before_blank, indented, in_list = None, True, False, False
    for number, line in enumerate(text.split("\n"), 1):
        found = FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence):
                fence = None
            continue
        if found:
            fence = found[1]
            continue
        if not line.strip():
            before_blank = True
            continue
        starts_item = re.match(r"\s*([-*+]|\d+[.)])\s", line)
        if starts_item:
            in_list = True
        elif not line.startswith(" "):
            in_list = False
        # Within a list the text of an item is indented by two to four columns, and its code by six and more.
        width = len(line) - len(line.lstrip(" "))
        indented = width >= (6 if in_list else 4) and (before_blank or indented) and not starts_item
        before_blank = False
        if not indented:
            yield number, line


def slug(heading):
    """The anchor that GitHub gives a heading, without the number of a repeated one."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"<[^>`]*>", "", text) if "`" not in text else text
    text = re.sub(r"(?<![\w`])[*_]{1,3}(\S(?:.*?\S)?)[*_]{1,3}(?![\w`])", r"\1", text)
    text = text.replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(path, cache={}):
    if path not in cache:
        names, seen = set(), {}
        for _, line in prose(path.read_text(encoding="utf-8")):
            names.update(HTML_ANCHOR.findall(line))
            if found := HEADING.match(line):
                name = slug(found[2])
                count = seen.get(name, 0)
                seen[name] = count + 1
                names.add(f"{name}-{count}" if count else name)
        cache[path] = names
    return cache[path]


def links(path):
    for number, line in prose(path.read_text(encoding="utf-8")):
        text = CODE.sub(lambda code: "x" * len(code[0]), line)
        for found in LINK.finditer(text):
            yield number, line[found.start(1) : found.end(1)]
        if found := REFERENCE.match(text):
            yield number, found[1]


def check_link(path, number, target):
    if SCHEME.match(target) or target.startswith("//"):
        return
    name, _, anchor = target.partition("#")
    file = (path.parent / unquote(name)).resolve() if name else path
    if name.startswith("/") or ROOT not in (file, *file.parents):
        return error(path, number, f"link {target}: expected a relative path within the repository, found one that leaves it")
    if not file.exists():
        return error(path, number, f"link {target}: expected {file.relative_to(ROOT)}, found no such file")
    if anchor and file.suffix == ".md" and unquote(anchor) not in anchors(file):
        near = sorted(known for known in anchors(file) if known.split("-")[0] == anchor.split("-")[0])
        found = f"; it has {', '.join(near[:3])}" if near else ""
        error(path, number, f"link {target}: expected a heading #{anchor} in {file.relative_to(ROOT)}, found none{found}")


def check_summary(pages):
    listed = {}
    for number, target in links(SUMMARY):
        file = (DOCS / target.partition("#")[0]).resolve()
        if file in listed:
            error(SUMMARY, number, f"{target}: expected each page once, found it in line {listed[file]} too")
        listed.setdefault(file, number)
        if file not in pages and file.exists():
            error(SUMMARY, number, f"{target}: expected a page below docs/, found another file")
    for page in pages:
        if page not in listed:
            error(page, 1, f"page: expected it in docs/SUMMARY.md, found no link to {page.relative_to(DOCS)}")


def check_size(path, limit):
    size = path.stat().st_size
    if size > limit:
        line = path.read_bytes()[:limit].count(b"\n") + 1
        error(path, line, f"size: expected at most {limit} bytes, found {size}")


def main():
    pages = sorted(path for path in DOCS.rglob("*.md") if path != SUMMARY)
    check_summary(pages)
    for page in pages:
        if GENERATED not in page.parents:
            check_size(page, PAGE_LIMIT)
    check_size(ROOT / "README.md", README_LIMIT)
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", SUMMARY, *pages]
    texts += sorted(ROOT.glob("examples/*/README.md"))
    for path in texts:
        for number, target in links(path):
            check_link(path, number, target)
    for path, line, text in sorted(errors):
        print(f"{path}:{line}: {text}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
