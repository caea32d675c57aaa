"""Reference values of TRL 0.11.4 and DeepSpeed-Chat for the tests of sessions: safetensors without torch."""

import array
import json
import struct
from pathlib import Path

CODES = {"I64": "q", "F32": "f", "U8": "B", "BOOL": "B", "F64": "d"}


class Tensors:
    """The tensors of a file, as flat lists with their shapes; a part of a tensor is stored as `name[a:b,...]`."""

    def __init__(self, path):
        data = Path(path).read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        self.kinds = {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
        self.places = {name: entry["data_offsets"] for name, entry in header.items()}
        self.data = data[8 + length :]

    def __contains__(self, name):
        return name in self.kinds

    def flat(self, name):
        numbers = array.array(CODES[self.kinds[name][0]])
        start, end = self.places[name]
        numbers.frombytes(self.data[start:end])
        return numbers.tolist()

    def rows(self, name):
        flat, (_, shape) = self.flat(name), self.kinds[name]
        return [flat[at * shape[1] : (at + 1) * shape[1]] for at in range(shape[0])]


def write(path, tensors):
    """Writes tensors `{name: (dtype, shape, bytes)}` to a file."""
    header, start = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + len(data)]}
        start += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


class Variant:
    """One run of two steps of trl 0.11.4."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.name = self.folder.name
        self.info = json.loads((self.folder / "info.json").read_text())
        self.data = Tensors(self.folder / "data.safetensors")
        self.is_seq2seq = self.name.startswith("t5")

    def tolerance(self, name):
        return max(5 * self.info["noise_floor_f32_vs_f64"].get(name, 0.0), 2e-5)

    def settings(self, known):
        """TRL's settings of the run that are fields of a configuration."""
        left_out = ("world_size", "backward_batch_size", "global_backward_batch_size", "global_batch_size", "total_ppo_epochs", "log_with")
        return {name: value for name, value in self.info["config"].items() if name in known and name not in left_out}

    def rows(self, step):
        """Queries, responses, scores and masks, which are None where the run was not given any."""
        each = {what: [self.data.flat(f"step{step}.{what}.{row}") for row in range(8)] for what in ("query", "response", "response_mask")}
        queries, responses, masks = each["query"], each["response"], each["response_mask"]
        if self.is_seq2seq:
            # TRL's start with the decoder's start token, and its mask leaves out the token after it.
            responses = [row[1:] for row in responses]
            masks = [[0, *row[2:]] for row in masks]
        counted = sum(self.data.flat(f"step{step}.masks"))
        given = counted < sum(map(len, responses))
        return queries, responses, self.data.flat(f"step{step}.scores"), masks if given else None

    def orders(self, step, epochs):
        """The order of the rows in each epoch; epochs that TRL left out go in the order of the rows."""
        micros = [at for at, micro in enumerate(self.info["micro"]) if micro["step"] == step]
        rows = [row for at in micros for row in self.data.flat(f"micro{at:02}.inds")]
        found = [rows[at : at + 8] for at in range(0, len(rows), 8)]
        return (found + [list(range(8))] * epochs)[:epochs]

    def is_left_padded(self):
        return any(row[0] == 0 for step in (0, 1) for row in self.data.rows(f"step{step}.attention_mask"))

    def is_whole(self):
        """Whether TRL does what its documentation states, to the weights: docs/migrate/trl-step.md lists where it does not."""
        config = self.info["config"]
        if self.is_left_padded() or config.get("whiten_rewards") or config.get("max_grad_norm"):
            return False
        most = config.get("ratio_threshold", 10.0)
        micros = range(len(self.info["micro"]))
        return all(self.mean_ratio(at) <= most for at in micros)

    def mean_ratio(self, at):
        step = self.info["micro"][at]["step"]
        masks, rows = self.data.rows(f"step{step}.masks"), self.data.flat(f"micro{at:02}.inds")
        ratios = self.data.rows(f"micro{at:02}.ratio")
        counted = [ratio for ratios, row in zip(ratios, rows) for ratio, kept in zip(ratios, masks[row]) if kept]
        return sum(counted) / len(counted)


def part(tensors, name):
    """The flat numbers of a tensor in a file, or of the part of it that is stored, with the slices of that part."""
    for known in tensors.kinds:
        if known.split("[")[0] == name:
            slices = known[len(name) + 1 : -1] if "[" in known else ""
            return tensors.flat(known), slices
    return None
