"""Ranks and forked processes import what the process imports that starts them, whatever lies in the current folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.meta.rank_jobs import places
from conformance.provers.faults import why_no_shim

_HOME = Path(__file__).resolve().parents[2]
# As `twinproof verify` starts pytest.
_BEGIN = """
import json, sys
sys.path.insert(0, {home!r})
from conformance.harness import RankPool
from conformance.meta.rank_jobs import places
from conformance.provers.faults import FaultServer
"""
_PROGRAMS = {
    "ranks": """
with RankPool("refimpl") as pool:
    print(json.dumps(pool.run(places, 1)[0]))
""",
    "faults": """
with FaultServer("refimpl", ("refimpl",)) as server:
    print(json.dumps(server.run_forked(places, root=sys.argv[1]).value()))
""",
}


@pytest.mark.parametrize("what", _PROGRAMS)
def test_packages_in_the_current_folder(what: str, tmp_path: Path) -> None:
    reason = why_no_shim() if what == "faults" else None
    if reason is not None:
        pytest.skip(reason)
    tree, root = tmp_path / "tree", tmp_path / "root"
    root.mkdir()
    for name in ("conformance", "refimpl", "twinproof"):
        (tree / name).mkdir(parents=True)
        (tree / name / "__init__.py").touch()
    program = _BEGIN.format(home=str(_HOME)) + _PROGRAMS[what]
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == places()
