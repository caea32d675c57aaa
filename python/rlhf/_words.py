"""Reads words of a command line by the types of a dataclass."""

import json
import types
import typing
from typing import Any

TRUE, FALSE = ("true", "yes", "1", "on", "y", "t"), ("false", "no", "0", "off", "n", "f")


def boolean(word: str) -> bool:
    """A word for true or false."""
    if word.lower() in TRUE:
        return True
    if word.lower() in FALSE:
        return False
    raise ValueError(word)


def json_map(word: str) -> Any:
    """A map as JSON; another word is left as it is, such as the path of a file."""
    return json.loads(word) if word.lstrip().startswith("{") else word


def number_or_word(word: str) -> Any:
    """A number where the word is one."""
    try:
        return float(word)
    except ValueError:
        return word


def reader(kind: type, part: Any) -> dict[str, Any]:
    """The arguments of `add_argument` for a field of a dataclass."""
    hint = part.type if not isinstance(part.type, str) else typing.get_type_hints(kind).get(part.name, str)
    options = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
    if bool in options:
        return {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL"}
    for option in options:
        if typing.get_origin(option) is list or option is list:
            item = (typing.get_args(option) or (str,))[0]
            return {"type": item if item in (int, float, str) else str, "nargs": "+", "metavar": "WORD"}
    if any(typing.get_origin(option) is dict or option is dict for option in options):
        return {"type": json_map, "metavar": "JSON"}
    if typing.get_origin(options[0]) is typing.Literal:
        return {"type": str, "choices": typing.get_args(options[0])}
    if float in options and str in options:
        return {"type": number_or_word, "metavar": "N"}
    return {"type": options[0] if options[0] in (int, float, str) else str, "metavar": "VALUE"}
