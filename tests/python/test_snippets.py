"""Runs the Python of the pages in docs/python, of migration and of rewards, with tiny models and short runs.

    python3 tests/python/test_snippets.py PROGRAM [unittest's arguments]

PROGRAM is the built `rlhf`; a debug build will do. Standard library only; no network.
"""

import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import support
from support import POLICY, REWARD, ROOT, Case, short_runs

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FOLDERS = ("docs/python/*.md", "docs/migrate/*.md", "docs/guides/reward*.md")
PAGES = [page for pattern in FOLDERS for page in sorted(ROOT.glob(pattern)) if BLOCK.search(page.read_text())]


class Snippets(Case):
    def run_page(self, page):
        os.makedirs(self.folder / "models")
        for name, target in (("base", POLICY), ("teacher", POLICY), ("judge", REWARD), ("chat", ROOT / "tests/golden/tools_policy")):
            (self.folder / "models" / name).symlink_to(target)
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            with short_runs():
                scope = {"__name__": "page"}
                blocks = BLOCK.findall(page.read_text())
                for block in blocks:
                    exec(compile(block, page.name, "exec"), scope)
        finally:
            os.chdir(before)
        return len(blocks)

    def test_every_page_with_code_runs(self):
        self.assertGreater(len(PAGES), 14)


def test_of(page):
    return lambda self: self.run_page(page)


for page in PAGES:
    setattr(Snippets, f"test_{page.parent.name}_{page.stem.replace('-', '_')}", test_of(page))

if __name__ == "__main__":
    support.main(__doc__)
