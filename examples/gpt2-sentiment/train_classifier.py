"""Trains the example's classifier: a small DistilBERT for negative and positive text of the demo's reviews.

From the checkout's root:

    scripts/venv.sh .venv-classifier examples/gpt2-sentiment/requirements.txt "installing torch and transformers"
    .venv-classifier/bin/python examples/gpt2-sentiment/train_classifier.py

It makes a WordPiece tokenizer from the training rows, trains from random weights, measures accuracy on the held-out rows
of data/sentences_test.jsonl, none of whose texts and reviews it has seen, and writes

    classifier/               a Hugging Face folder, as DistilBertForSequenceClassification saves it
    results/classifier.json   the accuracy, and how it was measured

Both are committed: the example runs without this script. Takes about a minute on one core.
"""

import argparse
import json
import pathlib
import random

import tokenizers
import torch
import transformers
from transformers import DistilBertConfig, DistilBertForSequenceClassification, DistilBertTokenizerFast

import make_data

HERE = pathlib.Path(__file__).resolve().parent
CONTEXT = 96  # tokens; the longest text of the demo has fewer
VOCABULARY = 1024


def make_tokenizer(texts):
    """A lower-case WordPiece tokenizer of these texts, as DistilBERT has it."""
    pieces = tokenizers.BertWordPieceTokenizer(lowercase=True)
    pieces.train_from_iterator(texts, vocab_size=VOCABULARY, min_frequency=2, show_progress=False)
    return DistilBertTokenizerFast(tokenizer_object=pieces._tokenizer, model_max_length=CONTEXT, do_lower_case=True)


def make_model(tokenizer):
    return DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=CONTEXT,
            n_layers=2,
            n_heads=4,
            dim=64,
            hidden_dim=128,
            pad_token_id=tokenizer.pad_token_id,
            id2label=dict(enumerate(make_data.LABELS)),
            label2id={label: number for number, label in enumerate(make_data.LABELS)},
        )
    )


def encode(tokenizer, rows):
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([make_data.LABELS.index(row["label"]) for row in rows])
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}, labels


def train(model, tokenizer, rows, arguments):
    """AdamW over shuffled batches with a linear decay to 0; returns the mean loss of the last epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.01)
    steps = arguments.epochs * -(-len(rows) // arguments.batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    order = random.Random(arguments.seed)
    model.train()
    for epoch in range(arguments.epochs):
        order.shuffle(rows)
        total = 0.0
        for start in range(0, len(rows), arguments.batch_size):
            part = rows[start : start + arguments.batch_size]
            inputs, labels = encode(tokenizer, part)
            loss = model(**inputs, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(part)
        print(f"epoch {epoch + 1} of {arguments.epochs}: loss {total / len(rows):.4f}", flush=True)
    return total / len(rows)


@torch.no_grad()
def logits_of(model, tokenizer, rows):
    """The logits of the rows, [rows, 2]; one row at a time, so that no pad is near."""
    model.eval()
    return torch.cat([model(**encode(tokenizer, [row])[0]).logits for row in rows])


def measure(logits, rows):
    """The share that is right of the rows with a word of feeling, and by kind; the mean logit of POSITIVE by kind and label.

    Rows without one, of kind "plain", can only be guessed.
    """
    right = [make_data.LABELS[number] == row["label"] for number, row in zip(logits.argmax(1).tolist(), rows)]
    felt = [good for good, row in zip(right, rows) if row["kind"] != "plain"]
    found = {"accuracy": round(sum(felt) / len(felt), 4), "rows": len(felt), "wrong": felt.count(False)}
    positive = logits[:, make_data.LABELS.index("POSITIVE")].tolist()
    for kind in sorted({row["kind"] for row in rows}):
        of_kind = [at for at, row in enumerate(rows) if row["kind"] == kind]
        part = found[kind] = {
            "rows": len(of_kind),
            "accuracy": round(sum(right[at] for at in of_kind) / len(of_kind), 4),
        }
        for label in make_data.LABELS:
            scores = [positive[at] for at in of_kind if rows[at]["label"] == label]
            part[f"mean_score_of_{label}"] = round(sum(scores) / max(len(scores), 1), 3)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output_dir", type=pathlib.Path, default=HERE / "classifier")
    parser.add_argument("--results", type=pathlib.Path, default=HERE / "results" / "classifier.json")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--train_rows", type=int, help="learn from the first so many rows only")
    parser.add_argument("--test_rows", type=int, help="measure on the first so many rows only")
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # the order of sums, and so the weights, depend on it
    torch.manual_seed(arguments.seed)
    rows, held_out = make_data.sentences(make_data.reviews())
    rows, held_out = rows[: arguments.train_rows], held_out[: arguments.test_rows]
    assert not {row["text"] for row in rows} & {row["text"] for row in held_out}
    tokenizer = make_tokenizer([row["text"] for row in rows])
    model = make_model(tokenizer)
    before = measure(logits_of(model, tokenizer, held_out), held_out)
    loss = train(model, tokenizer, rows, arguments)
    found = {
        "held_out": measure(logits_of(model, tokenizer, held_out), held_out),
        "held_out_before_training": before["accuracy"],
        "train": {"rows": len(rows), "epochs": arguments.epochs, "last_loss": round(loss, 4)},
        "seed": arguments.seed,
        "batch_size": arguments.batch_size,
        "learning_rate": arguments.learning_rate,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "vocabulary": len(tokenizer),
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
    model.save_pretrained(arguments.output_dir)
    tokenizer.save_pretrained(arguments.output_dir)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"held-out accuracy {found['held_out']['accuracy']:.2%} (untrained: {before['accuracy']:.2%})")
    print(f"Written to {arguments.output_dir} and {arguments.results}.")


if __name__ == "__main__":
    main()
