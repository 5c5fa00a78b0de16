"""The judge of upstream's tests is strict both ways, and names a file's content as git does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from conformance.peers.upstream.__main__ import main
from conformance.peers.upstream.ledger import Counts, Ledger, blob_of, judge, read_ledger
from conformance.peers.upstream.suites import SUITES, project_of

_UPSTREAM = {"a.py::T::one": "passed", "a.py::T::two": "passed", "a.py::T::three": "failed", "a.py::T::gpu": "skipped"}


def _judged(ours: dict[str, str], differences: dict[str, str], counts: Counts | None = None) -> list[str]:
    files = {} if counts is None else {("a.py", "b"): counts}
    return judge(Ledger("p", files, differences), {"a.py": "b"}, _UPSTREAM, ours)[1]


def test_what_passes_upstream_passes_or_is_named() -> None:
    assert _judged({"a.py::T::one": "passed", "a.py::T::two": "passed"}, {}) == []
    assert _judged({"a.py::T::one": "passed", "a.py::T::two": "failed"}, {}) == ["a.py::T::two: differs, by no entry"]
    assert _judged({"a.py::T::one": "passed"}, {"a.py::T::t*": "lacks it"}, Counts(2, 1)) == []


@pytest.mark.parametrize(
    ("ours", "differences", "counts", "said"),
    [
        ({"a.py::T::one": "passed", "a.py::T::two": "passed"}, {"a.py::T::two": "lacked it"}, None, "is mended"),
        ({"a.py::T::one": "passed"}, {"a.py::T::two": "lacks it"}, Counts(2, 2), "where the ledger has"),
        (
            {"a.py::T::one": "passed", "a.py::T::two": "passed"},
            {"a.py::T::three": "fails upstream too"},
            Counts(2, 2),
            "matches no test",
        ),
    ],
)
def test_stale_entries_are_errors(
    ours: dict[str, str], differences: dict[str, str], counts: Counts | None, said: str
) -> None:
    assert any(said in sentence for sentence in _judged(ours, differences, counts))


def test_a_file_of_which_nothing_passes_is_an_error() -> None:
    wrong = judge(Ledger("p"), {"a.py": "b"}, {"a.py": "failed"}, {})[1]
    assert wrong == ["a.py: nothing passes for upstream itself, so that nothing was compared"]


def test_content_is_named_as_git_names_it(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x = 1\n", encoding="utf-8")
    done = subprocess.run(["git", "hash-object", str(path)], check=True, capture_output=True, text=True)
    assert done.stdout.startswith(blob_of(path))


def test_projects_are_known_by_their_files(tmp_path: Path) -> None:
    assert project_of(tmp_path) is None
    for suite in SUITES:
        read_ledger(suite.project)
    (tmp_path / "bindings" / "python" / "tests").mkdir(parents=True)
    assert project_of(tmp_path) == "safetensors"


def test_a_suite_of_no_name_judges_nothing_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bindings" / "python" / "tests").mkdir(parents=True)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--only", "nothing"])
    assert ended.value.code == 2
    assert "--only nothing: safetensors has torch" in capsys.readouterr().err
