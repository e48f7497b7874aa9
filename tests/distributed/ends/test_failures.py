"""The page of failures shows what this version prints and explains, of runs that fail now as they failed then."""

from __future__ import annotations

from pathlib import Path

import pytest
from failures import FAILURES, Failure, make_folder, plain, section, sections_of_the_page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    make_folder(folder, digits)
    return folder


def test_the_page_has_each_failure_and_no_other() -> None:
    assert list(sections_of_the_page()) == [failure.title for failure in FAILURES]


@pytest.mark.exhaustive
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_a_failure_is_explained_as_the_page_says(failure: Failure, folder: Path) -> None:
    """To renew the page: python tests/failures.py > docs/failures.md"""
    assert plain(section(failure, folder)) == plain(sections_of_the_page()[failure.title])
