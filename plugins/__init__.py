"""Doors for parts of one's own: a registry for every kind that a recipe names, and the one loader of plugins."""

from .loading import Plugin, PluginError, has_run, load_file, load_installed, on_plugin, run_file
from .registry import PartConfig, Registry

__all__ = [
    "PartConfig",
    "Plugin",
    "PluginError",
    "Registry",
    "has_run",
    "load_file",
    "load_installed",
    "on_plugin",
    "run_file",
]
