"""The language of the demo: short movie reviews, written down as data, with a sampler and an exact parser.

A review is an opening, up to two body sentences and a closing. The opening is cut in two, the prompt and the start of
its completion:

    This western by Clara Holt | is a graceful tale of a shy baker. Leo Sato's script shines near an empty harbour.
    It made a fresh May evening in Oslo.

Sentences come from frames with slots. `{Genre}` takes any item of WORDS["Genre"], `{a Genre}` puts "a" or "an" before
it. Slots named in LEXICON or CUES, such as `{Adj}`, take a word of feeling, positive ("+") or negative ("-"). A frame
without such slots is plain; with them it is felt, and can be said with either feeling, but not with both at once.

The lexicon has two halves, A and B, equal in size for each part of speech and sharing no word stem. Preference pairs
use only A, the judge counts only B: what a model learns from A must carry over to B to count.

Python 3.9 or newer, standard library only.
"""

import random
import re

# Words of feeling: part of speech -> feeling -> half -> words.
LEXICON = {
    "Adj": {
        "+": {
            "A": "brilliant charming superb delightful moving graceful gripping clever splendid tender witty radiant "
            "thoughtful vivid elegant joyful",
            "B": "wonderful marvellous excellent lovely beautiful stunning inventive touching magnificent exciting "
            "exquisite fresh warm sincere masterful lively",
        },
        "-": {
            "A": "dreadful tedious clumsy shallow bland wooden dull lifeless hollow messy stale awful feeble crude "
            "tiresome pointless",
            "B": "terrible boring dreary sloppy horrible silly lazy flat weak stiff dismal muddled forgettable ugly "
            "insipid laboured",
        },
    },
    "Adv": {
        "+": {
            "A": "brilliantly superbly gracefully cleverly elegantly vividly",
            "B": "wonderfully beautifully stunningly masterfully inventively exquisitely",
        },
        "-": {
            "A": "dreadfully clumsily blandly crudely tediously feebly",
            "B": "terribly sloppily lazily horribly weakly stiffly",
        },
    },
    "Noun": {
        "+": {"A": "triumph delight gem joy treasure jewel", "B": "marvel masterpiece wonder beauty pleasure knockout"},
        "-": {
            "A": "disaster mess dud fiasco letdown failure",
            "B": "bore flop muddle disappointment catastrophe misfire",
        },
    },
    "Felt": {
        "+": {"A": "enjoyed admired treasured relished", "B": "loved adored savoured applauded"},
        "-": {"A": "hated detested endured regretted", "B": "loathed despised resented disliked"},
    },
    "Does": {
        "+": {"A": "shines sparkles delights charms", "B": "dazzles soars glows amazes"},
        "-": {"A": "stumbles fails drags grates", "B": "sinks flounders annoys irritates"},
    },
}
LEXICON = {
    part: {sign: {half: words.split() for half, words in halves.items()} for sign, halves in signs.items()}
    for part, signs in LEXICON.items()
}

# Everything else that fills a slot. An item may have slots of its own; most content is built of pairs (a trait and a
# role, a first and a last name), which keeps the number of different word pairs high whatever the feeling of a text.
WORDS = {
    "Person": ["{First} {Last}"],
    "First": "Ana Boris Clara Dmitri Elena Felix Greta Hugo Ines Jonas Karin Leo Marta Nils Olga Pavel Rosa Simon "
    "Tessa Viktor".split(),
    "Last": "Adler Brandt Costa Duval Egan Falk Gruber Holt Ibarra Jansen Keller Lund Moreau Novak Okada Petrov Quist "
    "Rossi Sato Varga".split(),
    "Genre": "thriller western drama comedy mystery romance musical fable satire epic whodunit melodrama adventure "
    "biopic".split(),
    "Hero": ["{Trait} {Role}"],
    "Trait": "retired young restless shy famous jealous stubborn nervous lonely blind ageing proud silent wandering "
    "penniless rival".split(),
    "Role": "baker sheriff widow pilot teacher smuggler painter judge sailor nurse clockmaker miner singer gardener "
    "detective soldier librarian farmer butcher translator dancer boxer postman surgeon".split(),
    "Deed": "finds inherits steals hides sells repairs guards buys paints wins carries loses".split(),
    "Thing": ["{Quality} {Object}"],
    "Quality": "old stolen broken secret borrowed rusty golden forged missing tiny cursed silver".split(),
    "Object": "map violin letter ferry diary watch piano lantern camera bicycle coat clock suitcase "
    "ring key boat".split(),
    "Place": ["in {Weather} {City}", "{Near} {a Look} {Site}"],
    "Weather": "rainy foggy sunlit snowy windy misty stormy dusty crowded sleepy".split(),
    "City": "Lisbon Oslo Prague Naples Havana Kyoto Cairo Dublin Vienna Quito Tunis Riga Porto Lima "
    "Seville Bergen".split(),
    "Near": "near behind beside below beyond".split(),
    "Look": "frozen distant empty hidden narrow flooded ruined painted nameless moonlit".split(),
    "Site": "harbour bridge farm station market border island valley canal chapel forest lighthouse".split(),
    "Moment": ["{Hour} {Event}"],
    "Hour": "midnight morning winter summer rooftop seaside village final second courtyard garden basement "
    "railway autumn".split(),
    "Event": "wedding trial storm duel dinner chase funeral escape reunion audition auction robbery rehearsal picnic "
    "election breakfast carnival shipwreck".split(),
    "Aspect": "script score editing lighting casting pacing dialogue prologue narration choreography camerawork ending "
    "makeup sound".split(),
    "Made": "acted written shot paced cut staged lit scored told played".split(),
    "When": ["last night", "on Monday", "on Friday", "at noon", "on Sunday", "at dawn"],
    "Month": "January February March April May June July August September October November December".split(),
    "Friend": ["my sister", "my uncle", "my neighbour", "our projectionist", "two friends", "the critics"],
}

# Cues: few and frequent words of feeling, in neither half, and in no preference pair. Which of 144 words go together is
# too thin a pattern for a minute of training; with these as hubs a small model learns it, and so what a mood is.
CUES = {
    "Cue": {
        "+": ["works", "stands out", "pays off", "holds up"],
        "-": ["falls short", "wears thin", "backfires", "falls apart"],
    },
    "Cheer": {"+": ["cheered", "praised", "saluted"], "-": ["booed", "mocked", "shunned"]},
}

# Openings: any start of a group goes with any end of the same group; the border between them is where prompts are cut.
OPENINGS = [
    {  # the start names the film, the end is a predicate
        "starts": [
            "This {Genre} by {Person}",
            "The {Genre} about {a Hero}",
            "{Person}'s {Genre} about {a Thing}",
            "Set {Place}, this {Genre}",
            "The story of {a Hero} and {a Thing}",
        ],
        "ends": [
            " is {a Adj} tale of {a Hero}.",
            " opens with {a Adj} {Event} {Place}.",
            " is {Adv} {Made} by {Person}.",
            " is {a Noun} set {Place}.",
            " {Does} after the {Moment}.",
            " {Cue} as {a Adj} tale of {a Hero}.",
            " {Cue} after the {Adj} {Moment}.",
            " ends {Place}.",
            " was filmed {Place} in {Month}.",
        ],
    },
    {  # the start is a clause, the end goes on from it
        "starts": [
            "{Person} plays {a Hero} {Place}",
            "In this {Genre} {a Hero} {Deed} {a Thing}",
            "{Person} directs and {Person} plays {a Hero}",
        ],
        "ends": [
            " and {Does} at the {Moment}.",
            ", and {Person}'s {Adj} {Aspect} carries the {Moment}.",
            ", and the {Moment} is {Adv} {Made}.",
            ", and I {Felt} the {Moment}.",
            ", and {Person}'s {Adj} {Aspect} {Cue}.",
            " and {Cue} at the {Adj} {Moment}.",
            ", and {Person}'s {Aspect} {Does}.",
            ", and it all ends {Place}.",
            ", and then {a Hero} {Deed} {a Thing}.",
        ],
    },
]
BODIES = [
    "{Person}'s {Adj} {Aspect} suits the {Moment}.",
    "{Person}'s {Aspect} {Does} {Place}.",
    "{Person} is {a Adj} {Role} {Place}.",
    "{Person} {Does} as {a Hero} {Place}.",
    "The {Moment} {Place} is {Adv} {Made}.",
    "I {Felt} the {Moment}, where the {Role} {Deed} {a Thing}.",
    "{Person} gives the {Role} {a Adj} {Object}.",
    "When the {Hero} {Deed} {a Thing}, the {Aspect} {Does}.",
    "{Person} and {Person} share {a Adj} {Moment}.",
    "The {Moment} {Place} is {a Noun}.",
    "{Person}'s {Adj} {Aspect} {Cue} {Place}.",
    "The {Moment} {Place} is {Adv} {Made} and {Cue}.",
    "We {Cheer} the {Adj} {Moment} {Place}.",
    "When the {Hero} {Deed} {a Thing}, the {Adj} {Aspect} {Cue}.",
    "{Person} {Cue} as {a Adj} {Role} {Place}.",
    "The {Role} {Deed} {a Thing} {Place}.",
    "{Person} plays the {Hero}.",
    "The {Moment} takes place {Place}.",
    "Then the {Role} meets {a Hero} {Place}.",
]
CLOSINGS = [
    "{Person}'s {Noun} opens in {City}.",
    "{Person}'s {Adj} {Event} ends it.",
    "I {Felt} {Person}'s {Event}.",
    "It made {a Adj} {Month} evening in {City}.",
    "The {Moment} {Does} too.",
    "{Person}'s {Adj} {Event} {Cue}.",
    "We {Cheer} {Person}'s {Adj} {Event}.",
    "It {Cue} as {a Adj} {Month} evening.",
    "It opens in {City} in {Month}.",
    "I saw it {When} with {Friend}.",
]

SLOT = re.compile(r"\{(a )?(\w+)\}")
SENTENCE_END = re.compile(r"(?<=\.) ")


def words_of_feeling(sign, halves="AB"):
    """All words of feeling `sign` ("+" or "-") of the given halves, as a set."""
    return {word for signs in LEXICON.values() for half in halves for word in signs[sign][half]}


def with_article(text):
    return ("an " if text[0] in "aeiou" else "a ") + text


def is_felt(frame):
    """Whether `frame` has slots for words of feeling."""
    return any(name in LEXICON or name in CUES for _, name in SLOT.findall(frame))


def has_cue(frame):
    return any(name in CUES for _, name in SLOT.findall(frame))


class Sampler:
    """Draws reviews. Uses only `random.Random.random`, whose stream every Python version keeps."""

    def __init__(self, seed):
        self.random = random.Random(seed).random

    def pick(self, items):
        return items[int(self.random() * len(items))]

    def weighted(self, weights):
        """A key of the dict `weights`, by its weight."""
        left = self.random() * sum(weights.values())
        for key, weight in weights.items():
            left -= weight
            if left < 0:
                return key
        return key

    def write(self, frame, used):
        """Fills the slots of `frame` except those of feeling; takes no item twice while `used` is the same set."""

        def fill(slot):
            article, name = slot.groups()
            if is_felt(slot.group(0)):
                return slot.group(0)
            items = [item for item in WORDS[name] if "{" in item or item not in used]
            item = self.pick(items)
            used.add(item)
            item = self.write(item, used)
            return with_article(item) if article else item

        return SLOT.sub(fill, frame)

    def feel(self, sentence, sign, halves="AB"):
        """Fills the slots of feeling with words of feeling `sign`, from `halves`."""

        def fill(slot):
            article, name = slot.groups()
            word = self.pick(CUES[name][sign] if name in CUES else LEXICON[name][sign][self.pick(halves)])
            return with_article(word) if article else word

        return SLOT.sub(fill, sentence)

    def start(self):
        """The index of a group of openings, and one of its starts: a prompt."""
        group = int(self.random() * len(OPENINGS))
        return group, self.write(self.pick(OPENINGS[group]["starts"]), set())

    def draft(self, group, felt=0.9, cues=0.45):
        """Sentences that complete a start of `group`, their slots of feeling still open.

        `felt` is the share of sentences with any, `cues` the share of those with a cue.
        """
        used, sentences = set(), []
        bodies = self.weighted({0: 0.1, 1: 0.8, 2: 0.1})
        for frames in [OPENINGS[group]["ends"]] + [BODIES] * bodies + [CLOSINGS]:
            feeling = self.random() < felt
            cue = feeling and self.random() < cues
            frame = self.pick([frame for frame in frames if is_felt(frame) == feeling and has_cue(frame) == cue])
            sentences.append(self.write(frame, used))
        return sentences

    def draft_in(self, group, mood, cues=0.45):
        """A draft that can show `mood`: one felt sentence at least, two for the mixed mood, none for the plain one."""
        least = {"plain": 0, "mixed": 2}.get(mood, 1)
        while True:
            draft = self.draft(group, 0.9 if least else 0, cues)
            if sum(map(is_felt, draft)) >= least:
                return draft

    def complete(self, draft, mood, halves="AB"):
        """The completion that `draft` becomes in `mood`. In the mixed mood the sentences take turns."""
        sign, out = "-" if mood == "negative" else "+", []
        if mood == "mixed":
            sign = self.pick("+-")
        for sentence in draft:
            out.append(self.feel(sentence, sign, halves))
            if mood == "mixed" and is_felt(sentence):
                sign = "-" if sign == "+" else "+"
        return " ".join(out)


def pattern(frame, sign):
    """The regular expression of all that `frame` can become in a sentence of feeling `sign`."""
    out, end = [], 0
    for slot in SLOT.finditer(frame):
        article, name = slot.groups()
        if name in CUES:
            items = CUES[name][sign]
        else:
            items = sum(LEXICON[name][sign].values(), []) if name in LEXICON else WORDS[name]
        out.append(re.escape(frame[end : slot.start()]))
        if article:
            out.append("(?:an (?=[aeiou])|a (?![aeiou]))")
        out.append("(?:%s)" % "|".join(pattern(item, sign) for item in items))
        end = slot.end()
    return "".join(out) + re.escape(frame[end:])


def either(frames):
    """A pattern for any of `frames`, each with one feeling throughout."""
    found = [pattern(frame, "+") for frame in frames]
    found += [pattern(frame, "-") for frame in frames if is_felt(frame)]
    return "(?:%s)" % "|".join(found)


START = re.compile("|".join(either(group["starts"]) for group in OPENINGS))
OPENING = re.compile("|".join(either(group["starts"]) + either(group["ends"]) for group in OPENINGS))
BODY = re.compile(either(BODIES))
CLOSING = re.compile(either(CLOSINGS))


def is_prompt(text):
    """Returns True if `text` is a complete start of an opening."""
    return START.fullmatch(text) is not None


def parses(review):
    """Returns True if `review` (prompt and response together) is a complete review of the grammar."""
    first, *bodies, last = SENTENCE_END.split(review) if "." in review[:-1] else [review, ""]
    return bool(
        len(bodies) <= 2
        and OPENING.fullmatch(first)
        and all(BODY.fullmatch(body) for body in bodies)
        and CLOSING.fullmatch(last)
    )
