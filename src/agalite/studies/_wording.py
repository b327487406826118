"""Numbers and lists as words, for messages and pages."""

from collections.abc import Sequence


def count_of(n: int, what: str) -> str:
    """ "1 trial", "2,000 trials"."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def join_words(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def duration(seconds: float) -> str:
    """ "1.5 min", "3.0 h", "2.1 days"."""
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{minutes:.1f} min"
