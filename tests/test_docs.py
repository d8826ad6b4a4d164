"""What the README and the pages say: every Python snippet runs, every test they name exists, every local link leads somewhere."""

import re
import runpy
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED_TEST = re.compile(r"`((?:tests/[\w/]+\.py|[A-F])::test_[\w*]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)")
SUITE = {path.stem[5].upper(): path for path in (ROOT / "tests" / "contract").glob("test_?_*.py")}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if SNIPPET.search(text_of(page))], ids=name_of)
def test_snippets_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a snippet may write files
    namespace: dict[str, object] = {}
    for snippet in SNIPPET.findall(text_of(page)):
        exec(compile(snippet, str(page), "exec"), namespace)  # noqa: S102 - our own documentation


EXAMPLES = runpy.run_path(str(ROOT / "docs" / "_ext" / "reference_pages.py"))


@pytest.mark.parametrize("page", [*EXAMPLES["GROUPS"], *EXAMPLES["LIBRARIES"]])
def test_examples_of_the_reference_run(page: str) -> None:
    example = (EXAMPLES["GROUPS"] | EXAMPLES["LIBRARIES"])[page][2]
    if page in EXAMPLES["LIBRARIES"]:
        pytest.importorskip(EXAMPLES["LIBRARIES"][page][0])
    exec(compile(example, page, "exec"), {})  # noqa: S102 - our own documentation


def test_the_readme_has_snippets() -> None:
    assert len(SNIPPET.findall(text_of(ROOT / "README.md"))) >= 2


def test_every_test_that_a_page_names_exists() -> None:
    missing, found = [], 0
    for page in PAGES:
        for place in NAMED_TEST.findall(text_of(page)):
            where, pattern = place.split("::")
            path = SUITE[where] if len(where) == 1 else ROOT / where
            names = re.findall(r"^def (test_\w+)", text_of(path), re.MULTILINE) if path.is_file() else []
            found += 1
            if not any(fnmatch(name, pattern) for name in names):
                missing.append(f"{name_of(page)}: {place}")
    assert not missing
    assert found > 60


def test_every_row_of_the_contract_is_there_once_and_is_shown() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", text_of(ROOT / "docs" / "contract.md"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 57))
    assert all("`" in shown for _, shown in rows)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = [link for link in LINK.findall(text_of(page)) if not re.match(r"[a-z]+:", link)]
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_the_workflow_calls_make_targets_that_exist() -> None:
    jobs = yaml.safe_load(text_of(ROOT / ".github" / "workflows" / "ci.yml"))["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    called = {target for run in runs for target in re.findall(r"make (\S+)", run)}
    assert called >= {"lint", "test", "docs"}
    assert called <= set(re.findall(r"^([\w./]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    assert all(
        any(step.get("uses", "").startswith("actions/checkout") for step in job["steps"]) for job in jobs.values()
    )


@pytest.mark.parametrize("template", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md")), ids=name_of)
def test_issue_templates_have_a_name_and_a_line_about_them(template: Path) -> None:
    _, head, text = text_of(template).split("---\n", 2)
    assert set(yaml.safe_load(head)) >= {"name", "about"} and text.strip()
