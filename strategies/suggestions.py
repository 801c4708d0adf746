"""What a user who misspelled a name may have meant, for error messages of all packages. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.55


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to `name`, whatever its case; None if none is similar."""
    by_folded = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=_CUTOFF)
    return by_folded[close[0]] if close else None


def suggest(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` for an error message, or an empty string if no known name is similar."""
    found = closest(name, known)
    return f", did you mean {found!r}?" if found else ""
