"""What an unquoted word or number of a recipe means: YAML 1.2, and an error where YAML 1.1 would read it otherwise.

1e-4 and 1e4 are floats and only true and false are booleans. ``on``, ``no``, ``010`` or ``1:30`` mean different things
to different YAML readers, so they must be quoted or rewritten.
"""

import re

Scalar = str | int | float | bool | None

_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **{sign + word: float(sign + "inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")},
}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")

_TRAPS = (
    (
        re.compile(r"y|Y|yes|Yes|YES|n|N|no|No|NO|on|On|ON|off|Off|OFF"),
        "is a boolean to some YAML readers and a word to others; write true or false, or quote it: '{0}'",
    ),
    (
        re.compile(r"[-+]?0[0-9_]+"),
        "is octal to some YAML readers and decimal to others; drop the leading zero, or quote it: '{0}'",
    ),
    (
        re.compile(r"[-+]?0[ob][0-9_]+|[-+]?0x[0-9a-fA-F]*_[0-9a-fA-F_]*"),
        "is a number to some YAML readers and a word to others; write it in decimal, or quote it: '{0}'",
    ),
    (
        re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"),
        "is a number in base 60 to some YAML readers; quote it: '{0}'",
    ),
    (
        re.compile(r"(?=.*_)[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?"),
        "is a number to some YAML readers and a word to others; leave out the underscores, or quote it: '{0}'",
    ),
    (
        re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?"),
        "is a date to some YAML readers and a word to others; quote it: '{0}'",
    ),
)


def plain_scalar(text: str) -> Scalar:
    """Read an unquoted scalar; ValueError with the way out where YAML 1.1 and 1.2 disagree."""
    if text in _WORDS:
        return _WORDS[text]
    for pattern, reason in _TRAPS:
        if pattern.fullmatch(text):
            raise ValueError(f"{text} {reason.format(text)}")
    if _INTEGER.fullmatch(text):
        return int(text)
    if _HEXADECIMAL.fullmatch(text):
        return int(text, 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text
