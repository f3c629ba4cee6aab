"""Writing a recipe as YAML that ``read_yaml`` reads back to the same values."""

from typing import Any

import yaml

from .plain_scalar import plain_scalar


def to_text(data: dict[str, Any]) -> str:
    """YAML in the order of ``data``; mappings and lists without others inside go on one line."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes a text that unquoted would be something else to ``plain_scalar``; writes equal values in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        is_plain = plain_scalar(text) == text
    except ValueError:
        is_plain = False
    # A literal ${ would be taken for an interpolation.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text.replace("${", "\\${"), style=None if is_plain else "'")


_Dumper.add_representer(str, _represent_text)
