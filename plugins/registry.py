"""Parts by name: what a recipe may write after ``mixer:``, ``transition:``, ``mlp:``, ...; one registry a kind.

A class with a nested Config registers itself by the default of its ``type``, and a field that is annotated with the
registry takes every registered Config:

    MIXERS: Registry[Mixer] = Registry("mixer")
    MixerSpec = Annotated[PartConfig, MIXERS]

    @MIXERS.register
    class Mine(nn.Module):
        class Config(PartConfig):
            type: Literal["mine"] = "mine"
"""

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

Part = TypeVar("Part")
AnyClass = TypeVar("AnyClass", bound=type[Any])

UNKNOWN_PART = "unknown_part"
"""The type of the pydantic error for a name that is not registered; its context holds kind, known and got."""


class PartConfig(BaseModel):
    """Options of a part; a subclass narrows ``type`` to the name it goes by. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: str


class Registry(Generic[Part]):
    """The classes of one kind by the name that a recipe gives them; in ``Annotated`` the field that takes their Config.

    Attributes:
        every: all registries of the process.
        kind: the word for a part in messages.
    """

    every: ClassVar[list["Registry[Any]"]] = []

    def __init__(
        self,
        kind: str,
        *,
        aliases: Collection[str] = (),
        default: str | None = None,
        takes_name: bool = False,
        methods: Collection[str] = (),
    ) -> None:
        """Make an empty registry.

        Args:
            kind: the word for a part in messages.
            aliases: names that the kind itself gives a meaning; no class may take them.
            default: what a mapping without ``type`` is; None refuses it.
            takes_name: whether ``silu`` stands for ``{type: silu}``; a Config without options is then written so too.
            methods: what a class must have.
        """
        self.kind, self._aliases, self._default = kind, aliases, default
        self._takes_name, self._methods = takes_name, methods
        self._classes: dict[str, type[Part]] = {}
        # A validated Config builds the class it came from, even when a later class has taken over its name.
        self._class_of_config: dict[type[PartConfig], type[Part]] = {}
        Registry.every.append(self)

    def register(self, cls: AnyClass) -> AnyClass:
        """Class decorator: let recipes name this class by the default of its ``Config.type``.

        A class of the same module takes over, such as that of a notebook cell or a changed file run again; two classes
        of one file may not have one name.

        Raises:
            ValueError: there is no such Config, a method is missing, or the name is taken.
        """
        name = _name_of(cls)
        abstract: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
        for method in (*self._methods, *sorted(abstract)):
            if method in abstract or not callable(getattr(cls, method, None)):
                raise ValueError(
                    f"{cls.__name__}: expected a method {method} as every {self.kind} has, got none; add it"
                )
        taken = self._classes.get(name)
        if name in self._aliases or (taken is not None and not _takes_over(cls, taken)):
            owner = f"{taken.__name__} of {taken.__module__}" if taken is not None else "an alias of the package"
            raise ValueError(f"{cls.__name__}: expected a new name, got {name!r}, that of {owner}; rename it")
        self._classes[name] = cls
        self._class_of_config[cls.Config] = cls
        return cls

    @classmethod
    @contextmanager
    def forgets_on_error(cls, module: str) -> Iterator[None]:
        """Take back what ``module`` registered inside if that raises: a file that fails half-way leaves nothing."""
        before = {registry: dict(registry._classes) for registry in cls.every}
        try:
            yield
        except BaseException:
            for registry in cls.every:  # an import inside may have made one, with classes of the package
                others = {name: x for name, x in registry._classes.items() if x.__module__ != module}
                registry._classes = before.get(registry, others)
            raise

    def get(self, name: str) -> type[Part] | None:
        """The class that a recipe gets for ``name``, None where there is none."""
        return self._classes.get(name)

    def class_of(self, config: PartConfig) -> type[Part]:
        """The class whose Config this is."""
        return self._class_of_config[type(config)]

    def names(self) -> tuple[str, ...]:
        """Every name, aliases too."""
        return (*self._classes, *self._aliases)

    def classes(self) -> tuple[type[Part], ...]:
        """Every class that has a name now."""
        return tuple(self._classes.values())

    def configs(self) -> list[type[PartConfig]]:
        """The Config of every class that has a name now."""
        return [cls.Config for cls in self._classes.values()]  # type: ignore[attr-defined]

    def validated(self, value: Any) -> PartConfig:
        """The Config that a name, a mapping with ``type`` or a Config stands for; strict: true is not 1.

        Raises:
            PydanticCustomError: the name is not known; lists those that are.
        """
        if type(value) in self._class_of_config:
            return value
        if self._takes_name and not isinstance(value, Mapping):
            value = {"type": value}
        if not isinstance(value, Mapping):
            raise PydanticKnownError("model_type", {"class_name": self.kind})
        name = value.get("type", self._default)
        if not isinstance(name, str) or name not in self._classes:
            raise self._unknown(name)
        config: type[PartConfig] = self._classes[name].Config  # type: ignore[attr-defined]
        return config.model_validate(value, strict=True)

    def _unknown(self, name: object) -> PydanticCustomError:
        known = ", ".join(self._classes if isinstance(name, str) and name in self._aliases else self.names())
        context = {"kind": self.kind, "known": known, "got": repr(name)}
        return PydanticCustomError(UNKNOWN_PART, "expected one of {known}, got {got}", context)

    def _written(self, config: PartConfig) -> PartConfig | str:
        return config.type if self._takes_name and list(type(config).model_fields) == ["type"] else config

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Written out with the options of its own class, not only with those of the annotation.
        written = core_schema.plain_serializer_function_ser_schema(
            self._written, return_schema=core_schema.any_schema()
        )
        return core_schema.no_info_before_validator_function(self.validated, handler(source), serialization=written)


def _takes_over(cls: type, taken: type) -> bool:
    """``cls`` is ``taken`` defined again, and not another class beside it."""
    if cls.__module__ != taken.__module__:
        return False
    module = sys.modules.get(cls.__module__)
    is_beside = getattr(module, taken.__name__, None) is taken and cls.__qualname__ != taken.__qualname__
    return not is_beside or cls.__module__ == "__main__"


def _name_of(cls: type[Any]) -> str:
    config = getattr(cls, "Config", None)
    if isinstance(config, type) and issubclass(config, PartConfig):
        name = config.model_fields["type"].default
        if isinstance(name, str):
            return name
    raise ValueError(
        f'{cls.__name__}: expected a nested class Config(PartConfig) with type: Literal["my_name"] = "my_name", '
        f"got {'none' if config is None else 'another'}; add it"
    )
