"""Runs the Python of the pages in docs/python, with tiny models and short runs.

    python3 tests/python/test_snippets.py PROGRAM [unittest's arguments]

PROGRAM is the built `rlhf`; a debug build will do. Standard library only; no network.
"""

import contextlib
import os
import re
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import support
from support import POLICY, REWARD, ROOT, Case

PAGES = sorted((ROOT / "docs/python").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# In place of the settings of real runs.
SHORT = {"per_device_train_batch_size": 4, "num_threads": 1, "num_sample_generations": 0, "num_generations": 2}


def short(kind):
    """A configuration whose runs are short, whatever a page sets."""
    made = kind.__init__

    def init(self, *args, **named):
        made(self, *args, **named)
        length = {"total_episodes": 4} if kind.__name__ == "PPOConfig" else {"max_steps": 2}
        for name, value in {**SHORT, **length, "max_completion_length": 5, "response_length": 5}.items():
            if name in kind.__dataclass_fields__:
                setattr(self, name, value)

    return mock.patch.object(kind, "__init__", init)


class Snippets(Case):
    def run_page(self, page):
        import rlhf

        os.makedirs(self.folder / "models")
        for name, target in (("base", POLICY), ("judge", REWARD)):
            (self.folder / "models" / name).symlink_to(target)
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            with contextlib.ExitStack() as stack:
                for kind in (rlhf.SFTConfig, rlhf.RewardConfig, rlhf.PPOConfig, rlhf.GRPOConfig, rlhf.RLOOConfig):
                    stack.enter_context(short(kind))
                scope = {"__name__": "page"}
                blocks = BLOCK.findall(page.read_text())
                for block in blocks:
                    exec(compile(block, page.name, "exec"), scope)
        finally:
            os.chdir(before)
        return len(blocks)

    def test_every_page_with_code_runs(self):
        self.assertGreater(len(PAGES), 5)


def test_of(page):
    return lambda self: self.run_page(page)


for page in PAGES:
    setattr(Snippets, f"test_{page.stem.replace('-', '_')}", test_of(page))

if __name__ == "__main__":
    support.main(__doc__)
