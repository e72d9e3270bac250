"""Masks secrets in free text before it is written to files that may be shared.

Facts about the process, the Trainer and the machine are an allow-list, but the message of an exception can contain
anything. Text that may be a secret is masked.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final
from urllib.parse import quote, quote_plus, unquote

FREE_TEXTS: Final = frozenset({"exception", "message", "reason", "traceback"})
"""Fields of the manifest that hold messages of other code."""

_SECRET: Final = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|PASS(?![A-Z])|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTHORIZATION"
    r"|(?<![A-Z])(?:PWD|PAT|AUTH)(?![A-Z])"
)
# The shell's current directory would match.
_DIRECTORY: Final = "PWD"
# Shorter values, as "true" or "1", occur in texts by chance.
_SHORTEST: Final = 8
_WORD: Final = re.compile(r"\S+")
_COLON: Final = re.compile(r":|%3a", re.IGNORECASE)
# Bounded: a megabyte of text without a space must not take seconds.
_PARAMETER: Final = re.compile(
    r"(?<=[?&;#])"
    r"(?=[\w.%~+-]{0,80}?(?:pass|pwd|token|secret|key|credential|auth|signature|(?<![a-z])sig(?![a-z])))"
    r"([\w.%~+-]{1,99})=([^&#\s]+)",
    re.IGNORECASE,
)
_CLOSING: Final = "'\")>],.;:}"
# A port before a path, as of HDFS, is not a password: a directory may be named like an e-mail address.
_PORT: Final = re.compile(r"[^/:@]*:\d{1,5}/[^:]*")
_CHAINED: Final = re.compile(r"::[\w+.-]*://")
_PLAIN: Final = re.compile(r"[^\s%]+")
_MASK: Final = "***"


def masked(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a text without the values of environment variables that hold secrets, and without passwords in URLs."""
    return masking(environment)(text)


def masking(environment: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Return :func:`masked` for several texts: the variables are searched once, which takes about 100 µs."""
    forms = _forms(os.environ if environment is None else environment)

    def mask(text: str) -> str:
        for form in forms:
            text = text.replace(form, _MASK)
        if "=" in text:
            text = _PARAMETER.sub(_without_value, text)
        return _WORD.sub(_without_password, text) if "://" in text else text

    return mask


def has_password(url: str) -> bool:
    """Return whether a URL has a password, a key or a token: before an ``@``, or as a parameter of that name."""
    for text in (url, unquote(url)):
        rest = _CHAINED.sub("/", text.partition("://")[2])
        user, is_named, _ = rest.rpartition("@")
        if (is_named and ":" in user and not _PORT.fullmatch(user)) or _PARAMETER.search(text):
            return True
    return False


def without_password(url: str) -> str:
    """Return a URL with its password masked; of a URL with escapes only the protocol."""
    return masked(url) if _PLAIN.fullmatch(url) else f"{url.partition('://')[0]}://{_MASK}"


def _forms(environment: Mapping[str, str]) -> list[str]:
    """Return every form in which a text may contain the secrets of the environment, the longest first."""
    found: set[str] = set()
    # Another thread may change the variables meanwhile.
    for name in list(environment):
        value = environment.get(name, "").strip()
        if len(value) < _SHORTEST or name == _DIRECTORY or not _SECRET.search(name.upper()):
            continue
        # The path of a file with a secret is not a secret; but a key may start like a path.
        if not (value.startswith("/") and os.path.exists(value)):  # noqa: PTH110 a Path raises where a name is too long
            found.update(_ways(value))
    # A form may begin with another.
    return sorted(found, key=len, reverse=True)


def _ways(value: str) -> set[str]:
    # The lines of a key can appear separately, indented.
    plain = {value, *(line for part in value.splitlines() if len(line := part.strip()) >= _SHORTEST)}
    once = {way for text in plain for way in _written(text)}
    # The text of an exception inside another is escaped again.
    return plain | once | {way for text in once for way in _written(text)}


def _written(value: str) -> Iterator[str]:
    raw = os.fsencode(value) if value.isascii() else value.encode(errors="surrogateescape")
    # Python chooses the quotes by the other characters of the text.
    for text in (repr(value), ascii(value), repr(raw)[1:]):
        yield text[1:-1]
    for text in (repr(value + "'\""), ascii(value + "'\""), repr(raw + b"'\"")[1:]):
        yield text[1:-4]
    for to_ascii in (True, False):
        yield json.dumps(value, ensure_ascii=to_ascii)[1:-1]
    for quoted in (quote(raw), quote(raw, safe=""), quote_plus(raw)):
        yield quoted
        yield re.sub("%..", lambda match: match[0].lower(), quoted)


def _without_value(match: re.Match[str]) -> str:
    name, value = match.groups()
    return f"{name}={_MASK}{value[len(value.rstrip(_CLOSING)) :]}"


def _without_password(match: re.Match[str]) -> str:
    """Mask the text between ``://`` and the last ``@``: passwords are not always quoted."""
    scheme, _, rest = match[0].partition("://")
    user, is_named, place = rest.rpartition("@")
    colon = _COLON.search(user)
    if colon is not None:
        return f"{scheme}://{user[: colon.start()]}:{_MASK}@{place}"
    # A token alone: other protocols have a user or a container there.
    if is_named and "/" not in user and scheme.lower().endswith(("http", "https")):
        return f"{scheme}://{_MASK}@{place}"
    return match[0]
