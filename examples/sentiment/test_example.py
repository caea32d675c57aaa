"""Tests of the demo's data and scripts: python3 -m unittest discover -s examples/sentiment -p 'test_*.py'"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import grammar  # noqa: E402
import judge  # noqa: E402
import make_data  # noqa: E402
import plot  # noqa: E402
import summary  # noqa: E402


def rows(name):
    return judge.read_answers(HERE / "data" / name)


def half(name):
    return grammar.words_of_feeling("+", name) | grammar.words_of_feeling("-", name)


def cues():
    phrases = {phrase for signs in grammar.CUES.values() for phrases in signs.values() for phrase in phrases}
    return {word for phrase in phrases for word in phrase.split()}


class Lexicon(unittest.TestCase):
    def test_no_word_is_in_two_places(self):
        parts = [halves for signs in grammar.LEXICON.values() for halves in signs.values()]
        words = [word for halves in parts for half in halves.values() for word in half]
        self.assertEqual(len(words), len(set(words)))
        self.assertGreaterEqual(len(grammar.words_of_feeling("+")), 60)
        self.assertGreaterEqual(len(grammar.words_of_feeling("-")), 60)

    def test_the_halves_are_equal_in_every_part_of_speech(self):
        for part, signs in grammar.LEXICON.items():
            sizes = {len(half) for halves in signs.values() for half in halves.values()}
            self.assertEqual(len(sizes), 1, part)

    def test_the_halves_share_no_stem(self):
        def stems(words):
            return {word[:5] for word in words}

        self.assertEqual(stems(half("A")) & stems(half("B")), set())

    def test_no_neutral_word_is_in_the_lexicon(self):
        frames = [frame for group in grammar.OPENINGS for side in group.values() for frame in side]
        frames += grammar.BODIES + grammar.CLOSINGS + sum(grammar.WORDS.values(), [])
        neutral = {word for frame in frames for word in judge.tokens(grammar.SLOT.sub(" ", frame))}
        self.assertEqual(neutral & (half("A") | half("B") | cues()), set())

    def test_no_cue_is_in_the_lexicon(self):
        self.assertEqual(cues() & (half("A") | half("B")), set())


class Grammar(unittest.TestCase):
    review = "This western by Clara Holt is a graceful tale of a shy baker. The garden duel dazzles too."

    def test_a_review_parses(self):
        self.assertTrue(grammar.parses(self.review))

    def test_broken_reviews_do_not_parse(self):
        for broken in [
            "",
            ".",
            self.review[:-1],
            self.review + " ",
            self.review.replace(". ", ".  "),
            self.review.replace("a graceful", "an graceful"),
            self.review.replace("western", "Western"),
            self.review.replace("graceful", "gracefully"),
            self.review.replace("The garden", "The garden garden"),
            "The garden duel dazzles too. This western by Clara Holt is a graceful tale of a shy baker.",
            "This western by Clara Holt is a graceful tale of a shy baker.",
            self.review + " The garden duel dazzles too.",
        ]:
            self.assertFalse(grammar.parses(broken), broken)

    def test_a_sentence_keeps_one_feeling(self):
        mixed = "Set in foggy Oslo, this drama is a gem set in rainy Lima. Leo Sato's dull score suits the final duel."
        self.assertTrue(grammar.parses(mixed + " It opens in Riga in May."))
        with unittest.mock.patch.object(grammar, "BODIES", ["{Person} is {Adj} and {Does}."]):
            body = re.compile(grammar.either(grammar.BODIES))
        self.assertTrue(body.fullmatch("Leo Sato is dull and drags."))
        self.assertFalse(body.fullmatch("Leo Sato is dull and shines."))

    def test_a_shuffled_sentence_does_not_parse(self):
        sampler = grammar.Sampler(3)
        for row in rows("sft.jsonl")[:300]:
            words = row["text"].split(" ")
            for at in range(len(words) - 1, 0, -1):
                other = int(sampler.random() * (at + 1))
                words[at], words[other] = words[other], words[at]
            shuffled = " ".join(words)
            self.assertTrue(shuffled == row["text"] or not grammar.parses(shuffled), shuffled)

    def test_all_that_the_sampler_says_parses(self):
        sampler = grammar.Sampler(4)
        for _ in range(300):
            for mood in make_data.MOODS:
                group, prompt = sampler.start()
                review = prompt + sampler.complete(sampler.draft_in(group, mood), mood)
                self.assertTrue(grammar.is_prompt(prompt), prompt)
                self.assertTrue(grammar.parses(review), review)


class Data(unittest.TestCase):
    def test_the_shipped_files_are_what_make_data_makes(self):
        self.assertEqual(make_data.check(), [])

    def test_every_review_parses(self):
        for row in rows("sft.jsonl"):
            self.assertTrue(grammar.parses(row["text"]), row)

    def test_pairs_parse_and_hold_no_words_of_feeling_but_those_of_half_a(self):
        for row in rows("preferences.jsonl") + rows("preferences_test.jsonl"):
            for side, sign, other in [("chosen", "+", "-"), ("rejected", "-", "+")]:
                self.assertTrue(grammar.parses(row["prompt"] + row[side]), row)
                words = set(judge.tokens(row["prompt"] + row[side]))
                if side == "chosen":
                    self.assertTrue(words & grammar.words_of_feeling(sign, "A"), row)
                self.assertFalse(words & (half("B") | grammar.words_of_feeling(other) | cues()), row)

    def test_prompts_are_neutral_starts_that_go_on_in_the_grammar(self):
        for row in rows("prompts.jsonl") + rows("prompts_test.jsonl"):
            self.assertTrue(grammar.is_prompt(row["prompt"]), row)
            self.assertFalse(set(judge.tokens(row["prompt"])) & (half("A") | half("B")), row)

    def test_every_prompt_goes_on_with_the_endings_of_its_own_group(self):
        for row in rows("prompts.jsonl") + rows("prompts_test.jsonl"):
            ends = [" ends in foggy Oslo.", ", and it all ends in foggy Oslo."]
            fitting = [grammar.parses(row["prompt"] + end + " It opens in Riga in May.") for end in ends]
            self.assertEqual(sum(fitting), 1, row)

    def test_held_out_prompts_open_nothing_else(self):
        held_out = tuple(row["prompt"] for row in rows("prompts_test.jsonl"))
        self.assertEqual(len(set(held_out)), len(held_out))
        for name in ["sft.jsonl", "preferences.jsonl", "preferences_test.jsonl", "prompts.jsonl"]:
            for row in rows(name):
                text = row["text"] if "text" in row else row["prompt"] + row.get("chosen", "")
                self.assertFalse(text.startswith(held_out), text)

    def test_test_pairs_have_openings_of_their_own(self):
        train = {row["prompt"] for row in rows("preferences.jsonl")}
        self.assertFalse(train & {row["prompt"] for row in rows("preferences_test.jsonl")})

    def test_the_files_are_small(self):
        self.assertLess(sum(path.stat().st_size for path in (HERE / "data").iterdir()), 2_000_000)


class Judge(unittest.TestCase):
    def test_only_words_of_half_b_count(self):
        self.assertEqual(judge.POSITIVE | judge.NEGATIVE, half("B"))
        found = judge.judge(
            [{"prompt": "", "completion": "brilliant dreadful wonderful, wonderful. terrible", "finish_reason": "stop"}]
        )
        self.assertEqual((found["positive_words"], found["negative_words"]), (2, 1))
        self.assertAlmostEqual(found["mood"], 1 / 3)

    def test_an_answer_parses_only_when_it_is_whole(self):
        start, end = Grammar.review[:26], Grammar.review[26:]
        found = judge.judge(
            [
                {"prompt": start, "completion": end, "finish_reason": "stop"},
                {"prompt": start, "completion": end, "finish_reason": "length"},
                {"prompt": start, "completion": end[:-1], "finish_reason": "stop"},
                {"prompt": start, "completion": end + end, "finish_reason": "stop"},
            ]
        )
        self.assertEqual(found["grammar"], 0.25)

    def test_repeated_text_lowers_the_share_of_distinct_bigrams(self):
        found = judge.judge([{"prompt": "", "completion": "a b a b", "finish_reason": "stop"}] * 2)
        self.assertAlmostEqual(found["distinct_bigrams"], 2 / 6)
        self.assertAlmostEqual(found["distinct_bigrams_per_answer"], 2 / 3)


class Summary(unittest.TestCase):
    """On a made-up run of twenty updates."""

    def run_folder(self, folder, last_score=2.0, after="wonderful"):
        def write(name, found):
            path = pathlib.Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in found))

        ending = " is a {} tale of a shy baker. The garden duel {} too."
        prompt = "This western by Clara Holt"
        write("sft/metrics.jsonl", [{"loss": 3.0}, {"loss": 1.5}])
        write(
            "reward/metrics.jsonl",
            [{"loss": 0.7, "accuracy": 0.5}, {"loss": 0.1, "accuracy": 0.9}, {"eval_accuracy": 1.0}],
        )
        write(
            "ppo/metrics.jsonl",
            [
                {
                    "objective/scores": 0.0 if at < 10 else last_score,
                    "objective/scores_std": 1.0 + at,
                    "objective/kl": at,
                }
                for at in range(20)
            ],
        )
        row = {"prompt": prompt, "finish_reason": "stop"}
        write("before.jsonl", [dict(row, completion=ending.format("terrible", "sinks"))] * 2)
        write("after.jsonl", [dict(row, completion=ending.format(after, "soars"))] * 2)
        pathlib.Path(folder, "timings.tsv").write_text("sft\t61\nppo\t20\n")

    def run_summary(self, folder):
        return subprocess.run([sys.executable, str(HERE / "summary.py"), folder], capture_output=True, text=True)

    def test_a_good_run_passes_and_is_written_down(self):
        with tempfile.TemporaryDirectory() as folder:
            self.run_folder(folder)
            done = self.run_summary(folder)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn("+2.00 standard deviations of the start (1.000)", done.stdout)
            self.assertIn("1 min 21 s", done.stdout)
            self.assertNotIn("\033", done.stdout)
            found = json.loads(pathlib.Path(folder, "summary.json").read_text())
            self.assertEqual(found["kl"], [0.5, 18.5])
            self.assertIn("| before PPO |", pathlib.Path(folder, "summary.md").read_text())

    def test_each_verdict_can_fail(self):
        for change, claim in [({"last_score": 0.9}, "score rose"), ({"after": "terrible horrible"}, "grammar")]:
            with tempfile.TemporaryDirectory() as folder:
                self.run_folder(folder, **change)
                done = self.run_summary(folder)
                self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                self.assertRegex(done.stdout, "NO +" + claim)

    def test_columns_fit_the_terminal(self):
        with tempfile.TemporaryDirectory() as folder:
            self.run_folder(folder)
            found = summary.summarise(pathlib.Path(folder))
        for line in summary.side_by_side(found["samples"], 80):
            self.assertLessEqual(len(line), 80)

    def test_an_unfinished_run_is_one_clear_line(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_summary(folder)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(
                done.stderr, r"^summary\.py: .*sft.metrics\.jsonl: not found; run examples/sentiment/run\.sh first\n$"
            )


class Plot(unittest.TestCase):
    def test_the_committed_image_is_drawn_from_the_committed_results(self):
        self.assertEqual(plot.IMAGE.read_text(), plot.draw())

    def test_every_point_of_every_seed_is_drawn(self):
        for key, *_ in plot.PANELS:
            points = {seed: len(values) for seed, values in plot.curves(key).items()}
            self.assertEqual(points, {"seed-1": 32, "seed-2": 32, "seed-3": 32})


@unittest.skipIf(os.name == "nt", "run.sh needs a POSIX shell")
class Run(unittest.TestCase):
    """run.sh, with a stand-in for the binary that logs its arguments and leaves empty files."""

    stand_in = """#!/bin/sh
echo "$@" >>"$LOG"
while [ $# -gt 1 ]; do
    case $1 in --output_dir) mkdir -p "$2"; echo "{}" >"$2/metrics.jsonl"; : >"$2/report.html" ;; --output_file) : >"$2" ;; esac
    shift
done
"""

    def run_script(self, folder, *arguments):
        binary = pathlib.Path(folder, "rlhf")
        binary.write_text(self.stand_in)
        binary.chmod(0o755)
        environment = dict(os.environ, LOG=str(pathlib.Path(folder, "log")), PYTHON=sys.executable)
        return subprocess.run(
            ["sh", str(HERE / "run.sh"), str(binary), *arguments],
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
        )

    def test_the_steps_run_in_order_with_the_seed_and_the_folder(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_script(folder, "--seed", "7", "--out", "my run")
            calls = pathlib.Path(folder, "log").read_text().splitlines()
            self.assertEqual(
                [call.split()[0] for call in calls], ["sft", "reward", "ppo", "generate", "generate"], done.stderr
            )
            self.assertTrue(all("--seed 7" in call and "/my run/" in call for call in calls), calls)
            self.assertTrue(all("--overwrite_output_dir" in call for call in calls[:3]), calls)
            self.assertEqual(done.returncode, 1)
            self.assertIn("metrics.jsonl: no line has loss", done.stderr)
            self.assertRegex(done.stdout, "\nLook at the run in a browser: .*/my run/ppo/report.html\n$")
            self.assertEqual(len(self.run_script(folder, "--out", "my run").stdout.split("== ")), 6)

    def test_a_folder_with_other_things_is_left_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "mine").mkdir()
            pathlib.Path(folder, "mine", "thesis.txt").write_text("years of work")
            done = self.run_script(folder, "--out", "mine")
            self.assertEqual(done.returncode, 1)
            self.assertIn("holds something that is no run of this demo", done.stderr)
            self.assertEqual([path.name for path in pathlib.Path(folder, "mine").iterdir()], ["thesis.txt"])

    def test_usage_errors_are_one_line_and_exit_2(self):
        with tempfile.TemporaryDirectory() as folder:
            for arguments in [("--sede", "7"), ("--seed", "x"), ("--out",), ("another",)]:
                done = self.run_script(folder, *arguments)
                self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)


if __name__ == "__main__":
    unittest.main()
