"""The code of documents on a GPU, as users run it: stand-ins serve while better kernels are compiled."""

import pytest

from tests import pages

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_the_code_of_a_page_runs_from_that_page(page):
    ran = pages.run(page, gpu=True)
    assert ran.returncode == 0, ran.stderr
