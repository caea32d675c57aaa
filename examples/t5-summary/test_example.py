"""Tests of this example's files and scripts; the training itself takes run.sh."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import make_data
import summary


class Data(unittest.TestCase):
    def test_the_committed_files_are_those_that_the_script_writes(self):
        for name, text in make_data.files().items():
            self.assertEqual((HERE / name).read_text(), text, name)

    def test_every_word_is_a_token_and_no_summary_is_in_two_files(self):
        vocab = json.loads((HERE / "tokenizer/tokenizer.json").read_text())["model"]["vocab"]
        rows = [row for name in make_data.ROWS for row in summary.read(HERE / f"data/{name}.jsonl")]
        words = {word for row in rows for word in (row["prompt"] + " " + row["completion"]).split()}
        self.assertEqual(words - set(vocab), set())
        self.assertEqual(len({row["completion"] for row in rows}), len(rows))


class Summary(unittest.TestCase):
    def test_rouge_l_is_the_f1_of_the_longest_common_subsequence(self):
        for text, expected in [("ana sold a map", 1.0), ("ana a map sold", 0.75), ("ana", 0.4), ("", 0.0)]:
            self.assertAlmostEqual(summary.rouge_l(text, "ana sold a map"), expected)

    def run_folder(self, folder, after):
        folder = pathlib.Path(folder)
        (folder / "ppo").mkdir()
        rows = [{"objective/scores": score} for score in [0.5, 0.6, 0.9]]
        (folder / "ppo" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        references = [row["completion"] for row in summary.read(HERE / "data/prompts_test.jsonl")]
        for name, texts in [("before", [text.split()[0] for text in references]), ("after", after(references))]:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps({"completion": text}) + "\n" for text in texts))
        return subprocess.run([sys.executable, HERE / "summary.py", folder], capture_output=True, text=True)

    def test_a_score_that_rose_is_0_and_one_that_did_not_is_1(self):
        for after, code in [(lambda texts: texts, 0), (lambda texts: [""] * len(texts), 1)]:
            with tempfile.TemporaryDirectory() as folder:
                done = self.run_folder(folder, after)
                self.assertEqual(done.returncode, code, done.stdout + done.stderr)
                self.assertIn("first and last tenth of the updates: 0.500 -> 0.900", done.stdout)


@unittest.skipIf(os.name == "nt", "run.sh needs a POSIX shell")
class Run(unittest.TestCase):
    def test_usage_errors_are_one_line_and_exit_2(self):
        for arguments in [(), ("true", "x"), ("true", "1", "out", "more")]:
            done = subprocess.run(["sh", HERE / "run.sh", *arguments], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)


if __name__ == "__main__":
    unittest.main()
