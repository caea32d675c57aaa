"""Tests of check.py: what is due, and that every test of the repository is in a part or in the checks of every change.

    python3 scripts/test_check.py            what can be told from the files
    python3 scripts/test_check.py --built    the names of the integration tests too, once they are built
"""

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

import check
from check import ALWAYS, ALWAYS_BESIDE, KEPT, PARTS, ROOT

COMMANDS = [command for _, command in ALWAYS + ALWAYS_BESIDE] + [step for part in PARTS for step in part.steps()]
# Ignored tests that no part runs, by a part of their reason.
NOT_HERE = ("started by", "one rank of the test above", "needs a GPU", "another folder of reference values",
            "needs a Python with the package openenv")


def files(*patterns):
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def integration_tests(*options):
    listed = subprocess.run(["bash", "-c", f"{check.MAIN} --list --format terse {' '.join(options)}"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout
    return [line.removesuffix(": test") for line in listed.splitlines() if line.endswith(": test")]


class Due(unittest.TestCase):
    def reason(self, changed, turn=9, path="a/b*"):
        part = check.Part("p", "about", paths=(path, "c/"), turn=1, minutes=1)
        return check.reason(part, {"p": "123"}, turn, lambda commit: changed if commit == "123" else None)

    def test_a_part_runs_where_a_file_of_its_paths_has_changed(self):
        self.assertEqual(self.reason(["x", "a/bc/d.rs"]), "a/bc/d.rs has changed")
        self.assertEqual(self.reason(["c/d"]), "c/d has changed")
        self.assertIsNone(self.reason(["a/c", "b", "cc/d", "a/b"], path="a/b.rs"))

    def test_a_part_runs_at_its_turn(self):
        self.assertEqual(self.reason([], turn=1), "its turn")

    def test_a_part_runs_where_the_commit_of_its_last_run_is_unknown(self):
        part = check.Part("p", "about", paths=(), turn=1, minutes=1)
        for checked in ({}, {"p": "0" * 40}):
            self.assertIn("unknown", check.reason(part, checked, 9))

    def test_the_file_of_commits_names_parts_that_there_are(self):
        names = {part.name for part in PARTS}
        self.assertEqual(len(names), len(PARTS))
        self.assertLessEqual(set(check.read_checked(check.CHECKED.read_text())), names)

    def test_turns_take_about_as_long(self):
        minutes = [sum(part.minutes for part in PARTS if part.turn == turn) for turn in range(check.TURNS)]
        self.assertLess(max(minutes) - min(minutes), 2, minutes)

    def test_each_path_of_a_part_has_a_file(self):
        tracked = check.git("ls-files").split("\n")
        for part in PARTS:
            for path in part.paths:
                self.assertIsNotNone(check.touches((path,), tracked), f"{part.name}: {path}: no such file")


class Complete(unittest.TestCase):
    def test_every_script_of_tests_is_in_a_command(self):
        scripts = files("tests/*/test_*.sh", "**/test_*.py", "tests/interop/*.py")
        helpers = {"tests/interop/runner.py", "tests/interop/chromium.py"}
        for script in set(scripts) - helpers - set(files("target/**/*.py", ".venv-*/**/*.py", ".libtorch/**/*.py")):
            self.assertTrue(any(script in command for command in COMMANDS), f"{script}: in no part of scripts/check.py")

    def test_every_target_of_cargo_is_in_a_command(self):
        listed = subprocess.run(["cargo", "metadata", "--no-deps", "--format-version=1", "--locked", "--offline"], cwd=ROOT, check=True,
                                capture_output=True, text=True).stdout
        flags = {"lib": "--lib", "bin": "--bins", "example": "--examples", "test": "--test {}"}
        for package in json.loads(listed)["packages"]:
            for target in package["targets"]:
                if flag := flags.get(target["kind"][0]):
                    flag = flag.format(target["name"])
                    self.assertTrue(any(f"{flag} " in f"{command} " for command in COMMANDS), f"{package['name']}: {flag}: in no command")

    def test_every_ignored_test_is_in_a_part_or_has_a_reason_not_to_be(self):
        ignored = [name for part in PARTS for name in part.ignored]
        for file in files("crates/*/src/**/*.rs", "crates/*/tests/**/*.rs"):
            text = (ROOT / file).read_text()
            for why, name in re.findall(r'^\s*#\[ignore(?: = "([^"]*)")?\]\s*(?:#\[.*\]\s*)*fn (\w+)', text, re.MULTILINE):
                known = any(reason in why for reason in NOT_HERE) or any(part in name for part in ignored)
                self.assertTrue(known, f"{file}: {name}: ignored, and in no part of scripts/check.py")

    def test_the_page_for_contributors_has_the_table_of_parts(self):
        there = check.table() in (ROOT / "CONTRIBUTING.md").read_text()
        self.assertTrue(there, "CONTRIBUTING.md: expected the output of `scripts/check.py --list`")

    def test_a_module_that_is_a_part_as_a_whole_has_a_test_in_every_change(self):
        for module in {name.split("::")[0] for part in PARTS for name in part.tests if name.endswith("::") and name.count("::") == 1}:
            kept = any(name.startswith(f"{module}::") for name in KEPT)
            self.assertTrue(kept, f"{module}: no test in every change: name one in KEPT")


class Libtorch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()
        self.checkout, self.cache = self.root / "checkout", self.root / "cache"
        (self.checkout / ".libtorch").mkdir(parents=True)
        self.place = self.checkout / ".libtorch/torch"

    def keep(self):
        [kept] = [self.cache / f"libtorch-{line[6:]}/torch" for line in (ROOT / "scripts/setup.sh").read_text().splitlines() if line.startswith("TORCH=")]
        (kept / "lib").mkdir(parents=True)
        (kept / "lib/libtorch_cpu.so").touch()
        return kept

    def test_a_copy_is_named_by_its_path_in_the_cache(self):
        self.place.mkdir()
        kept = self.keep()
        self.assertEqual(check.common_libtorch(self.checkout, self.cache), kept)

    def test_a_copy_that_is_not_in_the_cache_has_its_own_path(self):
        self.place.mkdir()
        self.assertEqual(check.common_libtorch(self.checkout, self.cache), self.place)

    def test_the_torch_of_a_python_is_named_though_the_cache_has_another(self):
        (self.root / "site/torch").mkdir(parents=True)
        self.place.symlink_to(self.root / "site/torch")
        self.keep()
        self.assertEqual(check.common_libtorch(self.checkout, self.cache), self.root / "site/torch")


class Lanes(unittest.TestCase):
    def beside(self, *steps):
        run = check.Run()
        with contextlib.redirect_stdout(io.StringIO()) as output:
            run.beside(steps)
        return run, output.getvalue()

    def test_each_step_runs_and_a_failed_one_fails_the_run(self):
        run, output = self.beside(("a", "echo one"), ("a", "false"), ("a", "echo two"), ("b", "echo '3 passed, 0 failed'"), ("c", "true"))
        self.assertTrue(run.failed)
        self.assertEqual({row.name: row.note for row in run.rows}, {"a": "FAILED", "b": "", "c": ""})
        self.assertEqual(sorted(run.closing), [("a", "FAILED, exit code 1: false"), ("b", "3 passed, 0 failed")])
        self.assertTrue("\none\n" in output and "\ntwo\n" in output and "\n=== a: false\nFAILED, exit code 1: false\n" in output, output)
        self.assertFalse(self.beside(("c", "true"))[0].failed)

    def test_an_exception_of_a_step_ends_the_run(self):
        def broken(name, command, at_once):
            raise OSError("no bash")

        with unittest.mock.patch.object(check.Run, "step", side_effect=broken), self.assertRaisesRegex(OSError, "no bash"):
            self.beside(("a", "true"), ("b", "true"))


class Built(unittest.TestCase):
    def test_every_name_in_a_part_is_that_of_a_test(self):
        tests = integration_tests()
        ignored = integration_tests("--ignored")
        self.assertGreater(len(tests), 500)
        for name in KEPT:
            self.assertIn(name, tests)
        for part in PARTS:
            for name in part.tests:
                self.assertTrue(any(name in test for test in tests), f"{part.name}: {name}: no such test")
            for name in part.ignored:
                self.assertTrue(any(name in test for test in ignored), f"{part.name}: {name}: no such ignored test")

    def test_a_command_with_a_filter_runs_a_test(self):
        filtered = [(part, command) for part in PARTS for command in part.commands if re.search(r"^cargo test .* -- \w+::$", command)]
        self.assertTrue(filtered)
        for part, command in filtered:
            listed = subprocess.run(f"{command} --list", shell=True, cwd=ROOT, capture_output=True, text=True)
            self.assertRegex(listed.stdout, r"(?m): test$", f"{part.name}: {command}: no such test")


if __name__ == "__main__":
    built = "--built" in sys.argv
    if built:
        sys.argv.remove("--built")
        check.settings()
    suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromTestCase(case) for case in ((Built,) if built else (Due, Complete, Libtorch, Lanes)))
    result = unittest.TextTestRunner().run(suite)
    sys.exit(not result.wasSuccessful())
