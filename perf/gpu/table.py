"""All steps in the order of their worth: what says most, and what everything else needs, comes first.

Phase 1: facts, the library, one launch, every operator against the CPU's bytes, the suite's GPU tests, torch's stream
sanitizer, and each kernel's bandwidth beside a copy. Phase 2: the gates, once without repetition and then in full.
Phase 3: what schedules hide, and the tables of torchrec PR 2916, which take 82 GB. Phase 4: captures of ncu, and
compute-sanitizer around all operators, which is slow. Phase 5: each suite whole, with its objects on the GPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from perf.gpu.capture import CAPTURED
from perf.gpu.sanitizer import TOOLS
from perf.harness.steps import Step

__all__ = ["PHASES", "STEMS", "all_steps", "python", "suite"]

PHASES = (1, 2, 3, 4, 5)
# A requirement of each suite that may not be skipped on a GPU.
_OF_SUITES = {"checkpoint": "CKPT-001", "kvstore": "KV-008", "offload": "OPT-001", "pipeline": "PIPE-086"}
STEMS = ("checkpoint", "kvstore", "offload", "pipeline")
_LIBRARY = ("library",)


def python(*words: str) -> tuple[str, ...]:
    """A command of this interpreter. Warnings of another torch, or of a plugin that is there, are no failures."""
    return (sys.executable, "-W", "default", "-m", *words)


def suite(
    name: str,
    module: str,
    *must: str,
    limit_s: float,
    environment: Sequence[tuple[str, str]] = (),
    device: str | None = None,
    keeps_operators: bool = False,
    phase: int = 1,
) -> Step:
    """A module of the suite on fastimpl, whose requirements ``must`` may not be skipped; a step of phase 1 by default.

    ``device``: where the module's objects lie, if the tests themselves do not say so. ``keeps_operators``: the
    evidence names the operators that it called with tensors of the GPU.
    """
    placed = ("--device", device) if device is not None else ()
    kept = ("--operators", f"{{out}}/operators-{name}.json") if keeps_operators else ()
    command = python("perf.gpu.tests", module, *placed, *kept, "--must", *must)
    return Step(f"tests:{name}", command, limit_s, phase, needs=_LIBRARY, environment=tuple(environment))


def _operators(device: str) -> list[Step]:
    needs = ("library", "launch")
    words = ("perf.gpu.operators", "{}", "--device", device, "--json", "{out}/bytes-{}.json")
    bytes_of = Step("bytes:{}", python(*words), 90, needs=needs)
    rate_of = Step(
        "rate:{}",
        python("perf.gpu.bandwidth", "{}", "--device", device, "--json", "{out}/rate-{}.json", "--seconds", "12"),
        60,
        needs=("library", "launch"),
    )
    return [
        Step("operators", python("perf.gpu.operators", "--list"), 60, needs=_LIBRARY, each=bytes_of),
        Step("kernels", python("perf.gpu.operators", "--list"), 60, needs=_LIBRARY, each=rate_of),
    ]


def _gates() -> list[Step]:
    bench = ("conformance.harness.cli", "bench")
    words = (*bench, "--gate", "{}", "--gates", "--fs", "{out}", "--json")
    once = Step("gate:{}:once", python(*words, "{out}/gate-{}-once.json", "--no-repeat"), 90, 2, needs=_LIBRARY)
    full = Step("gate:{}:full", python(*words, "{out}/gate-{}-full.json"), 150, 2, needs=_LIBRARY)
    listed = python(*bench, "--list-gates", "cuda")
    return [
        Step("gates-once", listed, 60, 2, needs=_LIBRARY, each=once),
        Step("gates-full", listed, 60, 2, needs=_LIBRARY, each=full),
    ]


def all_steps(*, device: str = "cuda") -> list[Step]:
    """Every step of every phase.

    Args:
        device: ``cpu`` rehearses: operators are compared with themselves, and what needs a GPU says so.
    """
    of_stems = [step for stem in STEMS for step in importlib.import_module(f"perf.gpu.{stem}").STEPS]
    library = python("perf.gpu.library", "--build", "build/gpu")
    needed = [Step("library", library, 300, phase, always=True) for phase in PHASES]
    first = [
        Step("facts", python("perf.gpu.facts"), 30),
        needed[0],
        Step("launch", python("perf.gpu.launch", "--device", device), 60, needs=_LIBRARY),
    ]
    operators, kernels = _operators(device)
    middle = [operators, *(step for step in of_stems if step.phase == 1), kernels]
    last = [step for step in of_stems if step.phase == 3]
    checked = [
        Step(f"sanitizer:{tool}", python("perf.gpu.sanitizer", tool, "--device", device), 170, 4, needs=_LIBRARY)
        for tool in TOOLS
    ]
    capture = ("perf.gpu.capture", "--device", device, "--json")
    captured = [
        Step(f"capture:{name}", python(*capture, f"{{out}}/capture-{name}.json", name), 60, 4, needs=_LIBRARY)
        for name in CAPTURED
    ]
    second = [*_gates(), *(step for step in of_stems if step.phase == 2)]
    whole = [
        suite(f"all-{stem}", f"conformance.{stem}", _OF_SUITES[stem], limit_s=420, device="cuda", phase=5)
        for stem in STEMS
    ]
    return [
        *(*first, *middle, needed[1], *second, needed[2], *last),
        *(needed[3], *captured, *checked, needed[4], *whole),
    ]
