"""examples/documents.py: parts of documents that scripts write."""

import pytest

from examples.documents import insert

BEFORE = "a\n<!-- x: written by s.py -->\nold\n<!-- x ends -->\nb\n"


def test_parts_are_replaced_between_their_marks():
    after = insert(BEFORE, "x", r"new \1", "s.py")
    assert after == "a\n<!-- x: written by s.py -->\n\nnew \\1\n\n<!-- x ends -->\nb\n"
    assert insert(after, "x", r"new \1", "s.py") == after


@pytest.mark.parametrize(("part", "by"), [("y", "s.py"), ("x", "t.py")])
def test_a_part_that_is_not_there_is_said(part, by):
    with pytest.raises(ValueError, match=f"no <!-- {part}: written by {by} -->"):
        insert(BEFORE, part, "new", by)
