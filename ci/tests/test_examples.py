"""Examples do what the commands in their docstrings promise; deliberate mistakes are named by their requirements."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Of each component: a test that sees the mistake, its requirement, and the first difference.
MISTAKES = {
    "kvstore": ("conformance.kvstore.test_values", "test_duplicates", "KV-014", "bytes differ first at offset #"),
    "checkpoint": ("conformance.checkpoint.test_values", "test_special_floats", "CKPT-002", "# of # elements differ"),
    "offload": ("conformance.offload.test_values", "test_groups", "OPT-006", "elements differ"),
    "pipeline": ("conformance.pipeline.test_bags", "test_heavy_duplicates", "PIPE-017", "# of # elements differ"),
}
# What each command of a program prints, by the first word of each line.
FIRST, AGAIN, ELSEWHERE = "losses exported", "resumed losses exported the", "resumed losses exported"
PROGRAMS = {
    "dlrm.py": [FIRST, AGAIN, ELSEWHERE],
    "fsdp2_checkpoint.py": [FIRST, AGAIN, ELSEWHERE],
    "llm_offload.py": ["losses 1251840 0 resumed"],
}
COMMAND = re.compile(r"^ {4}(?:torchrun --nproc-per-node (\d+)|python) examples/(\w+\.py) ([^#\n]*)", re.MULTILINE)
# torch is imported once. Ranks are forked from there, and meet through an agent's store, as those of torchrun do.
_FORKED = """
import json, os, runpy, sys, traceback
import torch, torch.distributed as dist, torch.distributed.checkpoint.state_dict, torch.distributed.fsdp
import fastimpl.checkpoint, fastimpl.kvstore, fastimpl.offload, fastimpl.pipeline

def forked(rank, count, store, path, words):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
        sys.argv = [path, *words]
        runpy.run_path(path, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

for path, count, words in json.loads(sys.argv[1]):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [forked(rank, count, store, path, words) for rank in range(count)]
    print("ENDED", *(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks), flush=True)
"""


@pytest.mark.night
def test_commands_do_what_they_promise(tmp_path: Path) -> None:
    commands, expected = [], []
    for name, said in PROGRAMS.items():
        found = COMMAND.findall((EXAMPLES / name).read_text(encoding="utf-8"))
        assert [program for _, program, _ in found] == [name] * len(said)
        for (count, _, words), lines in zip(found, said, strict=True):
            commands.append((str(EXAMPLES / name), int(count or 1), words.split()))
            expected += [*lines.split(), f"ENDED{' 0' * int(count or 1)}"]
    # One that resumes on other batches than those that followed has other losses, and says so.
    program = (EXAMPLES / "fsdp2_checkpoint.py").read_text(encoding="utf-8")
    (wrong := tmp_path / "wrong.py").write_text(program.replace("optimizer, step))", "optimizer, step % 4))"))
    commands.append((str(wrong), 2, ["out/fsdp2", "--resume", "4"]))
    expected += ["resumed", "losses", "exported", "ENDED 1 1"]
    command = [sys.executable, "-P", "-W", "ignore", "-c", _FORKED, json.dumps(commands)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    said_first = [line if line.startswith("ENDED") else line.partition(" ")[0] for line in lines]
    assert said_first == expected, done.stderr[-6000:]
    assert "the losses differ" in done.stderr


@pytest.fixture(name="verified", scope="module")
def _verified(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The tests of all mistakes in one run: what each takes alone is the start of Python and torch."""
    modules, names = [module for module, *_ in MISTAKES.values()], [name for _, name, *_ in MISTAKES.values()]
    command = [sys.executable, "-m", "conformance.harness.cli", "verify", "--impl", "mistakes", *modules]
    options = ["-k", " or ".join(names), "-q", "--tb=no", "--show-capture=no", "-p", "no:cacheprovider"]
    path = os.pathsep.join(filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [*command, *options],
        cwd=tmp_path_factory.mktemp("verified"),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.night
@pytest.mark.parametrize("stem", MISTAKES)
def test_each_deliberate_mistake_is_named(stem: str, verified: subprocess.CompletedProcess[str]) -> None:
    _, _, requirement, difference = MISTAKES[stem]
    assert verified.returncode == 1, verified.stdout + verified.stderr
    cluster = next(line for line in verified.stdout.splitlines() if requirement in line)
    assert difference in cluster
