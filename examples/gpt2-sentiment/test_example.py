"""Tests of the example's data and scripts: python3 examples/gpt2-sentiment/test_example.py

What needs torch is tested by `make test-part PART=transformers`, what needs rlhf by `cargo test`.
"""

import ast
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import make_data  # noqa: E402
import summary  # noqa: E402


def rows(name):
    return summary.read(HERE / "data" / name)


class Labels(unittest.TestCase):
    def test_a_text_has_the_label_of_its_words_and_none_where_they_disagree_or_are_missing(self):
        for text, label in [
            ("The garden duel dazzles too.", "POSITIVE"),
            ("The garden duel wears thin.", "NEGATIVE"),
            ("The garden duel dazzles and wears thin.", None),
            ("The garden duel ends.", None),
            ("A joyless freshness", None),  # words, not their parts
        ]:
            self.assertEqual(make_data.label_of(text), label, text)

    def test_a_beginning_is_a_start_of_its_review_and_a_text_without_feeling_is_plain(self):
        review = "This western by Clara Holt is a graceful tale of a shy baker. It opens in Riga in May."
        found = [row for _ in range(50) for row in make_data.texts_of(review, make_data.random.random)]
        self.assertEqual({row["label"] for row in found}, {"POSITIVE"})
        self.assertEqual({row["text"] for row in found if row["kind"] == "sentence"}, {review.split(". ")[0] + "."})
        self.assertIn("It opens in Riga in May.", {row["text"] for row in found if row["kind"] == "plain"})
        for row in found:
            self.assertEqual(row["kind"] == "plain", "graceful" not in row["text"], row)
            self.assertTrue(review.startswith(row["text"]) or row["text"] in review.split(". "), row)

    def test_a_review_of_two_moods_gives_nothing(self):
        self.assertEqual(list(make_data.texts_of("I loved it. I loathed it.", make_data.random.random)), [])


class Data(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.train, cls.held_out = make_data.sentences(make_data.reviews())

    def test_the_shipped_files_are_what_make_data_makes(self):
        self.assertEqual(make_data.check(), [])

    def test_no_held_out_text_is_learned(self):
        learned = {row["text"] for row in self.train}
        self.assertEqual([row for row in rows("sentences_test.jsonl") if row["text"] in learned], [])
        self.assertEqual(rows("sentences_test.jsonl"), self.held_out)

    def test_no_text_is_there_twice_and_each_kind_has_as_many_of_each_label(self):
        for part in (self.train, self.held_out):
            self.assertEqual(len({row["text"] for row in part}), len(part))
            for kind in ("sentence", "beginning", "plain"):
                labels = [row["label"] for row in part if row["kind"] == kind]
                self.assertGreater(len(labels), 100)
                self.assertEqual(*(labels.count(label) for label in make_data.LABELS))

    def test_prompts_say_nothing_good_or_bad_and_held_out_ones_are_others(self):
        training, held_out = ([row["prompt"] for row in rows(name)] for name in ("prompts.jsonl", "prompts_test.jsonl"))
        self.assertEqual((len(training), len(held_out)), (make_data.PROMPTS, make_data.PROMPTS_TEST))
        self.assertEqual(set(training) & set(held_out), set())
        starts = tuple(make_data.reviews())
        for prompt in training + held_out:
            self.assertFalse(any(pattern.search(prompt) for pattern in make_data.FELT.values()), prompt)
            self.assertTrue(any(review.startswith(prompt) for review in starts), prompt)


class Classifier(unittest.TestCase):
    recorded = json.loads((HERE / "results" / "classifier.json").read_text(encoding="utf-8"))

    def test_what_is_recorded_is_of_the_shipped_rows(self):
        held_out = rows("sentences_test.jsonl")
        for kind in ("sentence", "beginning", "plain"):
            self.assertEqual(self.recorded["held_out"][kind]["rows"], sum(row["kind"] == kind for row in held_out))
        train, _ = make_data.sentences(make_data.reviews())
        self.assertEqual(self.recorded["train"]["rows"], len(train))

    def test_it_is_small_and_an_ordinary_folder(self):
        folder = HERE / "classifier"
        self.assertLess(sum(path.stat().st_size for path in folder.iterdir()), 1_000_000)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.assertEqual(config["architectures"], ["DistilBertForSequenceClassification"])
        self.assertEqual(list(config["id2label"].values()), list(make_data.LABELS))

    def test_the_script_parses_and_asks_for_nothing_that_its_requirements_lack(self):
        tree = ast.parse((HERE / "train_classifier.py").read_text(encoding="utf-8"))
        names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        wanted = (HERE / "requirements.txt").read_text(encoding="utf-8")
        for name in names - {"argparse", "json", "pathlib", "random", "make_data"}:
            self.assertIn(f"\n{name}==", wanted)


class Summary(unittest.TestCase):
    """On a made-up run of two updates."""

    def write(self, folder, after_score=2.0):
        def lines(name, found):
            path = pathlib.Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in found))

        lines("ppo/metrics.jsonl", [{"objective/scores": at, "objective/kl": 0.5 * at} for at in range(2)])
        row = {"prompt": "This western by", "finish_reason": "length"}
        lines("before.jsonl", [dict(row, completion=" Leo Sato wears thin.", score=-1.0)] * 2)
        after = [" Leo Sato is a marvel | and dazzles.", " Leo Sato ends."]
        lines("after.jsonl", [dict(row, completion=text, score=after_score) for text in after])
        pathlib.Path(folder, "timings.tsv").write_text("sft\t61\nppo\t20\n")

    def run_summary(self, *arguments):
        return subprocess.run([sys.executable, str(HERE / "summary.py"), *arguments], capture_output=True, text=True)

    def test_it_counts_what_the_classifier_and_the_words_say(self):
        with tempfile.TemporaryDirectory() as folder:
            self.write(folder)
            done = self.run_summary(folder)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            found = json.loads(pathlib.Path(folder, "summary.json").read_text())
            self.assertEqual((found["before"]["score"], found["after"]["score"]), (-1.0, 2.0))
            self.assertEqual((found["before"]["negative_words"], found["before"]["plain_answers"]), (2, 0.0))
            self.assertEqual((found["after"]["positive_words"], found["after"]["plain_answers"]), (2, 0.5))
            self.assertIn("a marvel \\| and dazzles. | +2.00 |", pathlib.Path(folder, "summary.md").read_text())

    def test_a_score_that_has_not_risen_fails(self):
        with tempfile.TemporaryDirectory() as folder:
            self.write(folder, after_score=-1.0)
            self.assertEqual(self.run_summary(folder).returncode, 1)

    def test_an_unfinished_run_is_one_clear_line(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_summary(folder)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(
                done.stderr, r"^summary\.py: .*metrics\.jsonl: not found; run examples/gpt2-sentiment/run\.sh first\n$"
            )

    def test_text_loses_its_token_ids(self):
        with tempfile.TemporaryDirectory() as folder:
            source, target = pathlib.Path(folder, "ids"), pathlib.Path(folder, "text")
            row = {"prompt": "This", "completion": " film", "finish_reason": "stop"}
            source.write_text(json.dumps(dict(row, prompt_ids=[1], completion_ids=[2], logprobs=[-0.5])) + "\n")
            self.assertEqual(self.run_summary("--text", str(source), str(target)).returncode, 0)
            self.assertEqual(summary.read(target), [row])


@unittest.skipIf(os.name == "nt", "run.sh needs a POSIX shell")
class Run(unittest.TestCase):
    """run.sh, with a stand-in for the binary that logs its arguments and leaves a row of answers."""

    stand_in = """#!/bin/sh
echo "$@" >>"$LOG"
row='{"prompt": "This", "completion": " film", "finish_reason": "stop", "score": 1}'
while [ $# -gt 1 ]; do
    case $1 in
    --output_dir) mkdir -p "$2"; echo '{"objective/scores": 1, "objective/kl": 0}' >"$2/metrics.jsonl" ;;
    --output_file) echo "$row" >"$2" ;;
    esac
    shift
done
"""

    def run_script(self, folder, *arguments):
        binary = pathlib.Path(folder, "rlhf")
        binary.write_text(self.stand_in)
        binary.chmod(0o755)
        environment = dict(os.environ, LOG=str(pathlib.Path(folder, "log")), PYTHON=sys.executable)
        command = ["sh", str(HERE / "run.sh"), str(binary), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)

    def test_the_steps_run_in_order_with_the_seed_the_folder_and_the_classifier(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_script(folder, "--seed", "7", "--out", "my run", "--classifier", "mine")
            calls = pathlib.Path(folder, "log").read_text().splitlines()
            commands = [call.split()[0] for call in calls]
            self.assertEqual(commands, ["sft", "ppo", "generate", "score", "generate", "score"], done.stderr)
            self.assertTrue(all("/my run/" in call for call in calls), calls)
            self.assertTrue(all(call.startswith("score") or "--seed 7" in call for call in calls), calls)
            self.assertEqual([f"{folder}/mine" in call for call in calls], [False, True, False, True, False, True])
            self.assertEqual(
                sorted(path.name for path in pathlib.Path(folder, "my run").glob("*.jsonl*")),
                ["after.jsonl", "before.jsonl"],
            )
            self.assertEqual((done.returncode, done.stderr), (1, ""))  # the stand-in's score does not rise
            again = self.run_script(folder, "--out", "my run")
            self.assertEqual(len(again.stdout.split("== ")), 5, again.stderr)

    def test_a_folder_with_other_things_is_left_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "mine").mkdir()
            pathlib.Path(folder, "mine", "thesis.txt").write_text("years of work")
            done = self.run_script(folder, "--out", "mine")
            self.assertEqual(done.returncode, 1)
            self.assertIn("holds something that is no run of this example", done.stderr)
            self.assertEqual([path.name for path in pathlib.Path(folder, "mine").iterdir()], ["thesis.txt"])

    def test_usage_errors_are_one_line_and_exit_2(self):
        with tempfile.TemporaryDirectory() as folder:
            for arguments in [("--sede", "7"), ("--seed", "x"), ("--out",), ("--classifier",), ("another",)]:
                done = self.run_script(folder, *arguments)
                self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)


if __name__ == "__main__":
    unittest.main()
