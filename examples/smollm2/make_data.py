"""Writes data/: the prompts of both runs, the same bytes every time.

    python3 make_data.py             write the files
    python3 make_data.py --check     compare them with the files that are there

- extract.jsonl, extract_test.jsonl: a sentence about a person, and the request for one JSON object with two of the person's
  name, age, job and city. Column `facts` has the object that is right. No name, job or city of the held-out rows occurs in the
  training rows. The job is what the model gets wrong, so training asks for it more often than the held-out rows do.
- reviews.jsonl, reviews_test.jsonl: requests for one sentence of a review of a thing, which mention one aspect of it. Things
  occur in both files, but no pair of thing and aspect does.
- chat_test.jsonl: chat prompts that have to do with neither, to measure how far training moves the model elsewhere.

Python 3.9 or newer, standard library only.
"""

import itertools
import json
import pathlib
import random
import sys

DATA = pathlib.Path(__file__).resolve().parent / "data"
KEYS = ["name", "age", "job", "city"]
SENTENCES = [
    "{name} is a {age} year old {job} from {city}.",
    "{name}, a {job} from {city}, is {age} years old.",
    "The {job} {name} is {age} and lives in {city}.",
    "At the age of {age}, {name} works as a {job} in {city}.",
    "In {city} lives {name}, a {job}, who is {age}.",
    "My friend {name} is {age}, lives in {city} and works as a {job}.",
]
PEOPLE = {  # of the training rows
    "first": "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Karen Leo Mia Noah Olga Paul Rosa Sam Tina Victor".split(),
    "last": "Miller Rossi Novak Silva Brown Keller Moore Jensen Costa Wright Fischer Lopez Hall Murphy Tanaka Okada".split(),
    "city": "Paris Berlin Madrid Rome Vienna Oslo Lisbon Athens Dublin Prague Boston Chicago Denver Toronto Sydney Tokyo".split(),
    "job": (
        "doctor teacher baker pilot lawyer nurse farmer painter dentist chef driver singer plumber gardener judge barber banker "
        "builder cashier cleaner clerk coach cook dancer designer detective firefighter fisherman florist geologist guard "
        "hairdresser historian hunter jeweller journalist lifeguard locksmith manager miner model musician photographer physicist "
        "potter priest printer professor programmer psychologist receptionist reporter roofer sailor sculptor secretary shepherd "
        "shoemaker soldier translator trainer tutor typist vet weaver welder writer zookeeper"
    ).split(),
}
PEOPLE_TEST = {
    "first": "Alice Robert Julia Martin Helen Simon Laura Peter Nina Oscar".split(),
    "last": "Walker Bauer Santos Young Meyer Clark Marino Evans".split(),
    "city": "London Munich Warsaw Seattle Geneva Cairo Houston Naples".split(),
    "job": (
        "butcher carpenter tailor waiter librarian mechanic poet surgeon biologist conductor drummer glazier juggler minister "
        "porter runner"
    ).split(),
}
THINGS = (
    "hotel restaurant film book phone laptop museum bicycle coffee blender concert camera mattress bakery ferry toaster "
    "tent guitar jacket bookshop"
).split()
ASPECTS = "price,staff,noise,colour,size,delivery,weight,smell,wait,packaging,door,temperature,shape,instructions,floor,website".split(",")
CHAT = """
What is the capital of Italy?|How do I make a cup of tea?|Tell me about the moon.|Why is the sky blue?
Give me a tip for sleeping better.|What do bees do?|Explain what a computer is.|How can I learn to swim?
What is a good name for a dog?|Tell me a fact about whales.|How does a plant grow?|What is photosynthesis?
Who was Albert Einstein?|What should I pack for the beach?|How do I say hello in Spanish?|What is gravity?
Give me an idea for a birthday party.|Why do leaves fall in autumn?|What is the largest ocean?|How do I clean a window?
Tell me a short story about a fox.|What are the colours of a rainbow?|How long does it take to boil rice?|What is a verb?
Why do we dream?|What is the difference between a cat and a lion?|How do airplanes fly?|What does a doctor do?
Recommend a hobby for the winter.|What is the water cycle?|How do I write a letter to a friend?|What is jazz?
Explain addition to a child.|What is a volcano?|How do I stay healthy?|Why is exercise important?
What can I cook with potatoes?|Describe the city of Paris.|What is the Great Wall of China?|How do magnets work?
What is democracy?|Tell me about penguins.|How do I plant a tree?|What is the speed of light?
Write two lines of a poem about rain.|What makes a good teacher?|How do I fix a flat tyre?|What is an atom?
"""


class Draw:
    """Random choices that are the same in every version of Python: random() is, choice() and sample() are not."""

    def __init__(self, seed):
        self.random = random.Random(seed).random

    def below(self, end):
        return int(self.random() * end)

    def one(self, values):
        return values[self.below(len(values))]

    def some(self, values, count):
        """`count` different ones, in the order of `values`."""
        left = list(range(len(values)))
        chosen = [left.pop(self.below(len(left))) for _ in range(count)]
        return [values[at] for at in sorted(chosen)]

    def shuffled(self, values):
        values = list(values)
        for at in range(len(values) - 1, 0, -1):
            other = self.below(at + 1)
            values[at], values[other] = values[other], values[at]
        return values


def row(text, **columns):
    return {"prompt": [{"role": "user", "content": text}], **columns}


def extractions(people, count, seed, jobs=0.0):
    """Rows about `people`; a share `jobs` of them asks for the job and one other fact, the others for any two."""
    draw, rows = Draw(seed), {}
    while len(rows) < count:
        name = f"{draw.one(people['first'])} {draw.one(people['last'])}"
        whole = {"name": name, "age": 18 + draw.below(63), "job": draw.one(people["job"]), "city": draw.one(people["city"])}
        keys = draw.some(KEYS, 2)
        if draw.random() < jobs and "job" not in keys:
            other = draw.one(keys)
            keys = [key for key in KEYS if key in (other, "job")]
        sentence = draw.one(SENTENCES).format(**whole)
        text = f'Sentence: {sentence}\nReply with one JSON object with the keys "{keys[0]}" and "{keys[1]}", and nothing else.'
        rows[text] = row(text, facts={key: whole[key] for key in keys})
    return list(rows.values())


def reviews():
    """The training rows and the held-out rows."""
    pairs = Draw(3).shuffled(itertools.product(THINGS, ASPECTS))
    rows = [row(f"Write one sentence of a review of a {thing}. Mention the {aspect}.") for thing, aspect in pairs]
    return rows[64:], rows[:64]


def files():
    """The contents of each file by its name."""
    learned, held_out = reviews()
    found = {
        "extract.jsonl": extractions(PEOPLE, 512, 1, jobs=0.5),
        "extract_test.jsonl": extractions(PEOPLE_TEST, 128, 2),
        "reviews.jsonl": learned,
        "reviews_test.jsonl": held_out,
        "chat_test.jsonl": [row(text) for line in CHAT.split("\n") if line for text in line.split("|")],
    }
    return {name: "".join(json.dumps(entry) + "\n" for entry in rows).encode() for name, rows in found.items()}


def check():
    """Names of the files that are not what this script writes."""
    return [name for name, content in files().items() if not (DATA / name).exists() or (DATA / name).read_bytes() != content]


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit("\n".join(f"{DATA / name} differs" for name in check()) or 0)
    DATA.mkdir(exist_ok=True)
    for name, content in files().items():
        (DATA / name).write_bytes(content)
