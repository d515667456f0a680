"""Foreign exceptions, shortened so that they fit into one line of ours."""

_LONGEST = 160


def reason(error: BaseException) -> str:
    """The text of `error` on one line of at most 160 characters; its type where it has no text."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
