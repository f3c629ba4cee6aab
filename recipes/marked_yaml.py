"""A YAML reader that remembers the line and column of every key path.

Scalars follow YAML 1.2 (``plain_scalar``); anchors, aliases and merge keys work; an aliased node becomes a value of
its own at each place, so that changing one does not change the other. Duplicate keys and tags are refused.
"""

from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from .errors import KeyPath, dotted, excerpt
from .plain_scalar import plain_scalar

# Far above any recipe; stops a few lines of aliases of aliases from filling the memory.
MAX_VALUES = 10_000

_PLAIN = "plain"
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_TEXT = "tag:yaml.org,2002:str"

_HINTS = {
    "'\\t'": "indent with spaces, not tabs",
    "mapping values are not allowed": "one 'key: value' a line; quote a text that contains ': '",
    "could not find expected ':'": "write 'key: value', with a space after the colon",
    "expected <block end>": "keys of one mapping start in the same column",
    "expected ',' or": "close the bracket, or put a comma between the items",
    "undefined alias": "define it before its use, with &",
    "found character '@'": "quote the text",
    "found character '`'": "quote the text",
    "found character '%'": "quote the text",
    "expected a single document": "a recipe is one document: remove '---'",
}


@dataclass(frozen=True)
class Mark:
    """A place in a text, both counted from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Place:
    """Where a key path is written: its key (for a list item, the item) and its value."""

    key: Mark
    value: Mark


@dataclass(frozen=True)
class Document:
    """Plain data (dict, list, str, int, float, bool, None) and the place of every key path in it."""

    data: Any
    places: dict[KeyPath, Place]


class YamlError(ValueError):
    """A fault of the text itself, at one place; the message ends with the line and a caret below the column."""

    def __init__(self, message: str, text: str, position: int) -> None:
        super().__init__(message + excerpt(text, position))
        before = text[:position]
        self.mark = Mark(before.count("\n") + 1, position - before.rfind("\n"))


def read_yaml(text: str) -> Document:
    """Parse one YAML document; an empty one is None. Raises YamlError."""
    try:
        root = _Loader(text).get_single_node()
    except yaml.reader.ReaderError as error:
        message = f"broken YAML: the character U+{error.character:04X} is not allowed; remove it"
        raise YamlError(message, text, error.position) from None
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text) from None
    except RecursionError:
        raise YamlError("broken YAML: nested too deeply; a recipe has a few levels", text, 0) from None
    builder = _Builder(text)
    return Document(builder.value(root, ()) if root else None, builder.places)


class _Loader(yaml.SafeLoader):
    """Leaves the meaning of unquoted scalars open."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            return _PLAIN
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]


@dataclass
class _Builder:
    text: str
    places: dict[KeyPath, Place] = field(default_factory=dict)
    open_nodes: list[yaml.Node] = field(default_factory=list)

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if node.tag not in _COLLECTIONS:
            self.fail(node, f"{_tag(node)}: tags have no meaning in a recipe; remove it")
        if node in self.open_nodes:
            self.fail(node, f"{dotted(path) or 'the recipe'} contains itself through an alias; write the value out")
        self.open_nodes.append(node)
        result = self.mapping(node, path) if isinstance(node, yaml.MappingNode) else self.sequence(node, path)
        self.open_nodes.pop()
        return result

    def scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        if node.tag == _TEXT:
            return node.value
        if node.tag != _PLAIN:
            self.fail(node, f"{_tag(node)}: tags have no meaning in a recipe; remove it")
        try:
            return plain_scalar(node.value)
        except ValueError as error:
            self.fail(node, f"{dotted(path)}: {error}" if path else str(error))

    def sequence(self, node: yaml.Node, path: KeyPath) -> list[Any]:
        return [self.entry(item, item, (*path, index)) for index, item in enumerate(node.value)]

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        return {
            key: self.entry(key_node, value_node, (*path, key))
            for key, (key_node, value_node) in self.pairs(node, path).items()
        }

    def entry(self, key: yaml.Node, value: yaml.Node, path: KeyPath) -> Any:
        self.places[path] = Place(_mark(key.start_mark), _mark(value.start_mark))
        if len(self.places) > MAX_VALUES:
            self.fail(key, f"more than {MAX_VALUES} values; aliases of aliases multiply")
        return self.value(value, path)

    def pairs(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, tuple[yaml.Node, yaml.Node]]:
        """The entries of a mapping by key; its own entries win over merged ones, earlier merges over later ones."""
        own: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _PLAIN and key_node.value == "<<":
                for source in self.merge_sources(value_node):
                    merged = {**self.pairs(source, path), **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.fail(key_node, "a key is a name or a number, not a list or a mapping")
            key = self.scalar(key_node, path)
            if key is None:
                self.fail(key_node, "an empty key; write a name before the colon")
            if key in own:
                name, first = dotted((*path, key_node.value)), own[key][0].start_mark.line + 1
                self.fail(key_node, f"{name}: the key appears twice, first on line {first}; remove one of them")
            own[key] = (key_node, value_node)
        return {**merged, **own}

    def merge_sources(self, node: yaml.Node) -> list[yaml.MappingNode]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                self.fail(source, "<<: expected a mapping or a list of mappings to merge, such as *name")
            if source in self.open_nodes:
                self.fail(source, "<<: merges a mapping into itself; remove it")
        return list(sources)

    def fail(self, node: yaml.Node, message: str) -> NoReturn:
        raise YamlError(message, self.text, node.start_mark.index)


def _mark(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1)


def _tag(node: yaml.Node) -> str:
    return str(node.tag).replace("tag:yaml.org,2002:", "!!")


def _syntax_error(error: yaml.MarkedYAMLError, text: str) -> YamlError:
    problem = error.problem or error.context or "unreadable"
    hint = next((hint for sign, hint in _HINTS.items() if sign in f"{error.context} {problem}"), None)
    mark: Any = error.problem_mark or error.context_mark
    return YamlError(f"broken YAML: {problem}" + (f"; {hint}" if hint else ""), text, mark.index)
