"""README and docs: every link leads somewhere, every command is one that the program takes, every error text exists."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PROJECT
from documents import Block, blocks, pages

from horovod_train.commands.cli import EXAMPLE, Parser, config_parts
from horovod_train.config.loader import load
from horovod_train.errors import UserError
from horovod_train.main import COMMANDS, _parser

LANGUAGES = {"bash", "console", "text", "python", "yaml", "ini", "dockerfile", "diff"}
BLOCKS = [block for page in pages() for block in blocks(page)]
OURS = ["-m", "horovod_train.main"]
HEADING = re.compile(r"^#{1,6} +(.*)$", re.MULTILINE)


def our_words(block: Block) -> Iterator[list[str]]:
    """What follows `python -m horovod_train.main` or `horovod-train` in each of its commands."""
    for words in block.words:
        for i, word in enumerate(words):
            if words[i : i + 2] == OURS:
                yield words[i + 2 :]
            elif word == "horovod-train":
                yield words[i + 1 :]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_says_what_it_holds(block: Block) -> None:
    assert block.language in LANGUAGES, (
        f"{block}: ```{block.language}: expected one of {', '.join(sorted(LANGUAGES))}; bash blocks are run by a test, "
        "unless the line above is <!-- not run: the reason -->. See tests/documents.py."
    )
    assert not block.not_run or block.commands, f"{block}: only a block of commands needs a reason"


def refusal(words: list[str]) -> str:
    """Why the program would not take the words behind its name, or "". A config of ours is read, with its overrides."""
    try:
        if words and words[0] in COMMANDS:
            parser = Parser(prog=words[0])
            importlib.import_module(COMMANDS[words[0]][0]).add_arguments(parser)
            try:
                parser.parse_intermixed_args(words[1:])
            except TypeError:  # a command of several kinds
                parser.parse_args(words[1:])
        elif words != ["--version"]:
            given = _parser().parse_args(words)
            given.config = given.config or [EXAMPLE]
            names, overrides = config_parts(given)
            files = [str(PROJECT / name) for name in names]
            if all(Path(file).exists() for file in files):
                load(files, overrides)
    except (UserError, SystemExit) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("block", [block for block in BLOCKS if list(our_words(block))], ids=str)
def test_a_command_is_one_that_the_program_takes(block: Block) -> None:
    commands = [words for words in our_words(block) if "…" not in words]  # … is a form to fill in
    assert [refusal(words) for words in commands] == [""] * len(commands)


@pytest.mark.parametrize(
    "words", ["no_such_command", "plan --no-such-option", "--config configs/digits_convnet.yaml trian.epochs=3"]
)
def test_a_command_that_the_program_refuses_is_found_out(words: str) -> None:
    assert refusal(words.split())


def anchors(page: Path) -> set[str]:
    """As mkdocs and others make them of headings: lower case, hyphens for spaces, without punctuation."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = (re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in HEADING.findall(text))
    return {re.sub(r"[-\s]+", "-", heading) for heading in found}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    """Of README and its siblings; `make docs` sees to the site, where a link may not leave docs."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}: it has {sorted(anchors(target))}"


def test_every_page_is_in_the_sites_list() -> None:
    """mkdocs warns of one that is not; so that it is known without mkdocs too."""
    listed = set(re.findall(r"^ *- (?:[\w ]+: )?([\w-]+\.md)$", (PROJECT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.name for page in (PROJECT / "docs").glob("*.md")}


@functools.cache
def texts_of_the_package() -> str:
    """All strings of the package, one a line, with … for what is filled in."""
    found: list[str] = []
    for path in (PROJECT / "horovod_train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


QUOTED = re.findall(r"^### `(.+)`$", (PROJECT / "docs" / "faq.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("quoted", QUOTED)
def test_an_error_text_in_the_faq_is_one_of_the_package(quoted: str) -> None:
    assert quoted.strip("… ") in texts_of_the_package()


def test_the_faq_quotes_errors() -> None:
    assert len(QUOTED) >= 15


@pytest.mark.parametrize("text", ["data.train is not here", "ranks hold the same weights: …"])
def test_an_error_text_that_nothing_prints_is_found_out(text: str) -> None:
    assert text.strip("… ") not in texts_of_the_package()


def test_the_api_page_names_modules_that_exist() -> None:
    named = re.findall(r"^::: ([\w.]+)$", (PROJECT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert len(named) >= 10
    for name in named:
        module, _, member = name.rpartition(".")
        as_module = PROJECT / (name.replace(".", "/") + ".py")
        as_package = PROJECT / name.replace(".", "/") / "__init__.py"
        path = PROJECT / (module.replace(".", "/") + ".py")
        path = path if path.exists() else PROJECT / module.replace(".", "/") / "__init__.py"
        defines = rf"^(class |def )?{member}\b|\b{member} as {member}\b"
        is_member = path.exists() and re.search(defines, path.read_text(), re.MULTILINE)
        assert as_module.exists() or as_package.exists() or is_member, name


def test_the_way_from_a_rank_to_the_exchange_is_as_it_is_told() -> None:
    text = (PROJECT / "CONTRIBUTING.md").read_text()
    (table,) = re.findall(r"^\| file \| what happens there \| in \|\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `([\w/.]+)` \| .* \| `(\w+)` \|$", table, re.MULTILINE)
    assert 4 <= len(rows) <= 6
    for path, name in rows:
        assert re.search(rf"^(def|class) {name}\b", (PROJECT / "horovod_train" / path).read_text(), re.MULTILINE), path


def test_contributors_are_sent_to_files_that_exist() -> None:
    text = (PROJECT / "CONTRIBUTING.md").read_text()
    (table,) = re.findall(r"^\| to change \| look in \|\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`([\w/.]+/?[\w.]*)`", re.sub(r"^\| [^|]* \|", "", table, flags=re.MULTILINE))
    assert len(named) >= 10
    assert [path for path in named if not (PROJECT / "horovod_train" / path).exists()] == []
