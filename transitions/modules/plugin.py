"""Transitions of plugins: a class that derives from Transition needs no decorator to be named in recipes."""

from statemix.plugins import Plugin, on_plugin
from statemix.transitions.base import Transition

from .fields_module import fields_module, recipe_name
from .module import TransitionModule
from .registry import TRANSITIONS


def transitions_of(plugin: Plugin) -> dict[str, type[Transition]]:
    """The transitions defined in a plugin, by the name of the class; bases of others are left out."""
    found = {cls.__name__: cls for cls in plugin.classes() if issubclass(cls, Transition)}
    bases = {base for cls in found.values() for base in cls.__mro__[1:]}
    return {name: cls for name, cls in found.items() if cls not in bases}


@on_plugin
def register_transitions(plugin: Plugin) -> bool:
    """Register the transitions of a plugin, each under the snake_case of its class name.

    A transition whose module the plugin itself registers keeps that module.

    Raises:
        PluginError: one that cannot be made from hidden states, or a name taken.
    """
    transitions = transitions_of(plugin)
    modules = [cls for cls in plugin.classes() if issubclass(cls, TransitionModule)]
    for name, cls in transitions.items():
        known = TRANSITIONS.get(recipe_name(cls))
        if known in modules or getattr(known, "transition", None) is cls:
            continue
        try:
            TRANSITIONS.register(fields_module(cls))
        except Exception as error:  # annotations are read here, and may fail in any way
            raise plugin.refusal(name, error) from None
    return bool(transitions)
