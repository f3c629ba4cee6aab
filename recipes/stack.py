"""Stack expressions: which layers a model has, in order, as ``"(delta window)*12"``.

    stack = item item ...        item = name | ( stack )        either may be followed by *count

A list is the same, one after another: ``["delta*3", "window"]``. ``expand`` turns both into one name a layer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from .errors import Fault, Inconsistent, did_you_mean, excerpt, one_of

LAYER_NAME = r"[A-Za-z_][A-Za-z0-9_-]*"

# Deeper than any model; a slip of the finger such as *120000000 would otherwise fill the memory.
MAX_LAYERS = 10_000

_TOKEN = re.compile(rf"\s*(?:(?P<name>{LAYER_NAME})|(?P<number>\d+)|(?P<mark>[()*])|(?P<other>\S))")


@dataclass(frozen=True)
class Token:
    """A piece of an expression; ``position`` counts from 0."""

    kind: str
    text: str
    position: int


def expand(stack: str | Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """One layer name a layer. ``known`` are the names that may be used.

    Raises Inconsistent; the path of its fault is () for an expression and (index,) for an item of a list.
    """
    if isinstance(stack, str):
        return _Parser(stack, known, ()).whole()
    if not stack:
        raise Inconsistent([Fault((), f"expected at least one layer, got an empty list; name {one_of(known)}")])
    names: list[str] = []
    for index, item in enumerate(stack):
        names += _Parser(item, known, (index,)).whole()
    return tuple(names)


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str, known: Sequence[str], path: tuple[int, ...]) -> None:
        self.text = text
        self.known = known
        self.path = path
        self.tokens = [
            Token(match.lastgroup or "", match[match.lastgroup or 0], match.start(match.lastgroup or 0))
            for match in _TOKEN.finditer(text)
        ]
        self.next = 0

    def whole(self) -> tuple[str, ...]:
        names = self.items()
        token = self.peek()
        if token.kind != "end":
            self.fail(token.position, f"')' closes nothing at position {token.position + 1}; remove it")
        if not names:
            self.fail(0, f"expected at least one layer, got an empty stack; name {one_of(self.known)}")
        return tuple(names)

    def items(self) -> list[str]:
        names: list[str] = []
        while self.peek().kind != "end" and self.peek().text != ")":
            item = self.item()
            count, position = self.count()
            if len(names) + len(item) * count > MAX_LAYERS:
                self.fail(position, f"more than {MAX_LAYERS} layers; lower the count")
            names += item * count
        return names

    def item(self) -> list[str]:
        token = self.take()
        if token.kind == "name":
            if token.text not in self.known:
                self.fail(
                    token.position,
                    f"unknown layer {token.text} at position {token.position + 1}; "
                    f"expected {one_of(self.known)}{did_you_mean(token.text, self.known)}",
                )
            return [token.text]
        if token.text == "(":
            return self.group(token.position)
        self.fail(
            token.position,
            f"expected a layer name or '(', got '{token.text}' at position {token.position + 1}; "
            "write names with spaces between them, and *count after what repeats",
        )

    def group(self, start: int) -> list[str]:
        names = self.items()
        if self.peek().kind == "end":
            self.fail(start, f"'(' at position {start + 1} is never closed; add ')'")
        self.take()
        if not names:
            self.fail(start, f"the group at position {start + 1} is empty; name a layer in it or remove it")
        return names

    def count(self) -> tuple[int, int]:
        """The number after '*', or 1, and where it is written."""
        if self.peek().text != "*":
            return 1, self.peek().position
        star, number = self.take(), self.peek()
        if number.kind != "number" or int(number.text) == 0:
            got = f"'{number.text}'" if number.text else "nothing"
            self.fail(
                min(number.position, max(len(self.text) - 1, 0)),
                f"expected a count of 1 or more after '*' at position {star.position + 1}, got {got}; "
                "write a count, such as *2, or remove '*'",
            )
        self.take()
        return int(number.text), number.position

    def peek(self) -> Token:
        return self.tokens[self.next] if self.next < len(self.tokens) else Token("end", "", len(self.text))

    def take(self) -> Token:
        token = self.peek()
        self.next += 1
        return token

    def fail(self, position: int, message: str) -> NoReturn:
        raise Inconsistent([Fault(self.path, message + excerpt(self.text, position))])
