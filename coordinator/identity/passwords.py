"""Passwords: which are accepted, and how they are stored.

Argon2id (RFC 9106) with 64 MiB, three passes and four lanes, the RFC's second recommendation. A check takes about a tenth of a
second and 64 MiB, so callers bound how many run at the same time.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from string import ascii_lowercase, digits
from typing import TYPE_CHECKING

from coordinator.errors import Refusal

if TYPE_CHECKING:
    from argon2 import PasswordHasher

NO_PASSWORD = "*"
"""In place of the hash, as in /etc/shadow: no password is the right one. Of users who sign in elsewhere."""
MIN_CHARACTERS = 12
MAX_CHARACTERS = 1024
_MIN_DISTINCT = 5
_MIN_NAME_CHARACTERS = 3
"""Of a name that a password must not contain; shorter ones are in many words."""
_COMMON_LETTERS = """
password passwort passphrase passwordpassword mypassword newpassword thisismypassword defaultpassword temporarypassword
qwertyuiop qwertyuiopasdfghjkl asdfghjkl qwerty qwertz qwertzuiop azerty letmein iloveyou welcome trustnoone whatever
administrator admin adminadmin changeme changemenow secret topsecret football baseball basketball superman batman
sunshine princess dragon monkey shadow master michael jennifer computer internet starwars correcthorsebatterystaple
fedloop fedloopadmin coordinator
"""
"""Letters of passwords that guessers try first; digits and signs around them make no difference."""
_COMMON = frozenset(_COMMON_LETTERS.split())
_SEQUENCES = (digits * (MAX_CHARACTERS // 10 + 2), ascii_lowercase * (MAX_CHARACTERS // 26 + 2))


def require_strong(password: str, name: str) -> None:
    """Refuses a password that is short, common, monotonous or contains the user's name.

    Raises:
        Refusal: 422 `weak_password`.
    """
    lowered = password.lower()
    letters = "".join(each for each in lowered if each.isalpha())
    if not MIN_CHARACTERS <= len(password) <= MAX_CHARACTERS:
        problem = f"it has {len(password)} characters, expected {MIN_CHARACTERS} to {MAX_CHARACTERS}"
    elif len(set(lowered)) < _MIN_DISTINCT:
        problem = f"it has fewer than {_MIN_DISTINCT} different characters"
    elif letters in _COMMON or _is_sequence(lowered):
        problem = "it is among the first that are guessed"
    elif len(name) >= _MIN_NAME_CHARACTERS and name.lower() in lowered:
        problem = "it contains the user's name"
    else:
        return
    raise Refusal(422, "weak_password", f"this password is too weak: {problem}; use several unrelated words")


def hash_password(password: str) -> str:
    """The Argon2id hash with its salt and parameters, in PHC format."""
    return _hasher().hash(_encoded(password))


def is_password(password_hash: str | None, password: str) -> bool:
    """Whether this is the password with this hash. Without a hash the work is done for nothing, and the answer is False.

    An unknown name therefore takes as long as a wrong password.
    """
    from argon2.exceptions import VerifyMismatchError

    known = None if password_hash == NO_PASSWORD else password_hash
    try:
        matches = _hasher().verify(known or _hash_of_nobody(), _encoded(password))
    except VerifyMismatchError:
        return False
    return matches and known is not None


def _is_sequence(text: str) -> bool:
    """Whether the characters count up or down, as in `123456789012`."""
    return any(text in each or text[::-1] in each for each in _SEQUENCES)


def _encoded(password: str) -> bytes:
    """One encoding whatever the keyboard: composed characters, and any text that JSON can hold."""
    return unicodedata.normalize("NFC", password).encode("utf-8", "surrogatepass")


@lru_cache(1)
def _hasher() -> PasswordHasher:
    # Imported with the first password: a coordinator that is used with its admin token alone needs none.
    from argon2 import PasswordHasher
    from argon2.profiles import RFC_9106_LOW_MEMORY

    return PasswordHasher.from_parameters(RFC_9106_LOW_MEMORY)


@lru_cache(1)
def _hash_of_nobody() -> str:
    return hash_password("the password of nobody")
