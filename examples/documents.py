"""Parts of documents that scripts write, between two marks each."""

from __future__ import annotations

import re


def insert(document: str, part: str, text: str, by: str) -> str:
    """Replace what lies between a part's two marks.

    Parameters
    ----------
    document : str
        The document.
    part : str
        The part's name, which both marks have.
    text : str
        What it becomes.
    by : str
        The script that writes it, which the first mark names.

    Raises
    ------
    ValueError
        If the document lacks the marks.
    """
    begin, end = f"<!-- {part}: written by {by} -->", f"<!-- {part} ends -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(document):
        raise ValueError(f"the document has no {begin} with a later {end}")
    return pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{end}", document)
