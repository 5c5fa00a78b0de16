"""Rules of the house that no linter knows: stable ABI, layers, sizes of files, matching rooms, nothing of one machine.

Prints one line per violation and exits 1 if there is any.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import tomllib

ROOT = Path(__file__).parent.parent
LINES_MAX = 700
# What both implementations share is few files, each one thing whole, rather than small ones.
SHARED_MODULES_MAX, SHARED_LINES_MAX = 39, 1100
# What launchers share; every other header is an algorithm, on which sanitizers run without torch.
LAUNCHER_HEADERS = ("args.h", "handles.h")
STEMS = ("kvstore", "pipeline", "offload", "checkpoint")
# Each may import itself and those before it. Examples are programs: nothing imports them, and the wheel has none.
LAYERS = ("twinproof", "refimpl", "fastimpl", "conformance", "perf", "examples")
# What each distribution holds. The library needs nothing but these two; the suite may need what it likes.
DISTRIBUTIONS = {
    "pyproject.toml": {"twinproof", "refimpl", "fastimpl"},
    "conformance/pyproject.toml": {"conformance", "perf"},
}
LIBRARY_NEEDS = {"torch", "safetensors"}
REFERENCE_FILES = {"__init__.py", "checkpoint.py", "kvstore.py", "offload.py", "optimizers.py", "pipeline.py"}
REFERENCE_LINES_MAX = 1500
# The reference is formulas and plain loops: no threads, no JSON, no operating system, no distributed checkpoint.
REFERENCE_IMPORTS = {
    "__future__", "collections.abc", "contextlib", "copy", "dataclasses", "functools", "itertools", "math", "typing",
    "torch", "torch.distributed", "torch.nn", "torch.optim", "safetensors", "safetensors.torch",
}  # fmt: skip
UNSTABLE = re.compile(
    r'#include\s*[<"](torch/extension|torch/all|torch/library|torch/torch|ATen/|c10/|pybind11/|Python\.h)'
)
MACHINE = re.compile(r"/(home|root|work|Users)/\w|(pypi|pythonhosted|conda)\.(org|io|com)")


def tracked() -> list[Path]:
    """Files of the tree: those git tracks or would track."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def stable_includes(files: list[Path]) -> Iterator[str]:
    """Only LibTorch's stable headers, and none of torch's in the kernels."""
    for path in files:
        if path.suffix not in (".cpp", ".cu", ".h", ".cuh") or "csrc" not in path.parts:
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            in_kernel = (
                path.suffix == ".h" and path.name not in LAUNCHER_HEADERS and re.search(r"#include\s*<torch", line)
            )
            if UNSTABLE.search(line) or in_kernel:
                yield f"{path.relative_to(ROOT)}:{number}: include outside the stable ABI: {line.strip()}"


def undefined_symbols(library: Path) -> Iterator[str]:
    """The built library needs no Python and no C++ symbol of torch."""
    names = subprocess.run(
        ["nm", "-DC", "--undefined-only", library], check=True, capture_output=True, text=True
    ).stdout
    for line in names.splitlines():
        symbol = line.split(maxsplit=1)[1] if " " in line.strip() else line
        if re.search(r"\bPy[A-Z_]\w*|\bat::|\bc10::", symbol.replace("w ", "")):
            yield f"{library.name}: undefined symbol outside the stable ABI: {symbol}"


def unproven_operators(files: list[Path], library: Path) -> Iterator[str]:
    """``build_info()`` lists every operator that the CUDA sources register, or names its evidence."""
    registered = {
        name
        for path in files
        if path.suffix == ".cu"
        for name in re.findall(r'm\.impl\("(\w+)"', path.read_text(encoding="utf-8"))
    }
    ask = (
        "import fastimpl, json, twinproof as shared; "
        "print(json.dumps([fastimpl.build_info(), sorted(fastimpl._PROVEN_CUDA_OPS), fastimpl._RAN_SOURCES, "
        "shared.are_lowered()]))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", ask], check=True, capture_output=True, text=True)
    info, proven, sources, is_lowered = json.loads(done.stdout.splitlines()[-1])
    if is_lowered:
        yield "twinproof: regimes are lowered, expected shipped: this package is for tests"
    if info["regimes"] != "shipped":
        yield f"{library.name}: regimes are {info['regimes']}, expected shipped: this library is for tests"
    if info.get("cuda") and registered != {*info["unproven_cuda_ops"], *proven}:
        missing = sorted(registered ^ {*info["unproven_cuda_ops"], *proven})
        yield f"{library.name}: build_info() and the CUDA sources disagree on {', '.join(missing)}"
    evidence = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "perf/results").rglob("*.json")]
    ran = {
        name
        for found in evidence
        for name in found.get("cuda_operators_run", ())
        if found["environment"]["gpus"] and found["library_sources"] == sources
    }
    for name in proven:
        if name not in ran:
            yield f"{library.name}: {name} is called proven, and no evidence of a GPU names it"


def messages() -> Iterator[str]:
    """What Python tells C++ has the same fields, in the same order, with the same version on both sides."""
    header = (ROOT / "fastimpl/csrc/kvstore/messages.h").read_text(encoding="utf-8")
    native = ast.parse((ROOT / "fastimpl/kvstore/native.py").read_text(encoding="utf-8"))
    ours = {
        node.name: [
            field.target.id
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        ]
        for node in native.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Message")
    }
    theirs = {
        name: re.findall(r"^  int64_t (\w+);", body, re.MULTILINE)
        for name, body in re.findall(r"struct (\w+) \{\n(.*?)\n\};", header, re.DOTALL)
    }
    if ours != theirs:
        yield f"fastimpl/csrc/kvstore/messages.h: got {theirs}, fastimpl/kvstore/native.py has {ours}"


# Numbers that decide no way: bits and widths of formats, status codes, launches (which the SIMT prover draws), what the
# system bounds, and how much is told. Every other number of a fast path is a regime, which a build for tests lowers.
FIXED_NUMBERS = {
    "fastimpl/offload/packing.py": {"_DEVICE_BATCH"},
    "fastimpl/csrc/checkpoint/crc32.h": {"kCrcLaneBytes", "kCrcStrideBytes"},
    "fastimpl/csrc/checkpoint/dequantize.h": {"kGroupBytes"},
    "fastimpl/csrc/checkpoint/rectangle_copy.h": {"kDimMax"},
    "fastimpl/csrc/checkpoint/strided.h": {"kStridedDimMax"},
    "fastimpl/csrc/common/memory.h": {"kHugePageBytes", "kPageBytes"},
    "fastimpl/csrc/common/vectors.h": {"kBlock"},
    "fastimpl/csrc/kvstore/batch.h": {"kLineBytes", "kFarBytes"},
    "fastimpl/csrc/kvstore/hash.h": {"kHeaderBytes"},
    "fastimpl/csrc/kvstore/map.h": {"kGroupSlots", "kTagBits", "kDepthMax"},
    "fastimpl/csrc/kvstore/pool.h": {"kChunkRowsMin"},
    "fastimpl/csrc/offload/foreach.h": {"kSlotFlags"},
    "fastimpl/csrc/offload/pack.h": {"kLine", "kPackBatch", "kPackWord"},
    "fastimpl/csrc/pipeline/grid_ids.h": {"kRunBytes"},
    "fastimpl/csrc/offload/slab.h": {"kNodesMax", "kWordBits"},
    "fastimpl/csrc/pipeline/rows.h": {"kLineBytes"},
    "fastimpl/csrc/pipeline/step.h": {"kLineColumns"},
    "twinproof/checkpoint/catalog.py": {"INDEX_BYTES_MAX", "_ONE"},
    "twinproof/checkpoint/format.py": {"HEADER_BYTES_MAX", "HEADER_BYTES_REMOTE", "PAGE_BYTES", "_DEPTH_MAX"},
    "twinproof/checkpoint/plan.py": {"BLOCK_BYTES_MIN", "FILE_COUNT_MAX"},
    "twinproof/kvstore/deltas.py": {"DIGEST_BYTES"},
    "twinproof/kvstore/eviction.py": {"ROUNDS_KEPT"},
    "twinproof/kvstore/options.py": {"HEADER_BYTES"},
    "twinproof/offload/states.py": {"ALIGN_BYTES"},
    "twinproof/engine.py": {"_PAGE_BYTES"},
}
# Kernels for devices: their blocks, rings and long runs are crossed by proofs that choose the shapes.
DEVICE_HEADERS = re.compile(r"(_kernel|_plan|simt|device\w*)\.(h|cuh)$|/device_\w+\.h$")


def regimes(files: list[Path]) -> Iterator[str]:
    """A number at which code takes another way can be lowered, so that the suite crosses it; see common/regimes.h."""
    number = r"(?:int64_t\{1\} << )?(\d[\d']*)(?: << (\d+))?"
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in (".h", ".cpp") and name.startswith("fastimpl/csrc/") and "/tests/" not in name:
            found = re.findall(r"\bconstexpr [^;]*;", path.read_text(encoding="utf-8"))
            pairs = [pair for line in found for pair in re.findall(rf"\b(k[A-Z]\w*) = {number}(?=[,;])", line)]
        elif path.suffix == ".py" and name.startswith(("fastimpl/", "twinproof/")):
            pairs = re.findall(
                rf"^(_?[A-Z][A-Z0-9_]*) = {number}\s*(?:#.*)?$", path.read_text(encoding="utf-8"), re.MULTILINE
            )
        else:
            continue
        if DEVICE_HEADERS.search(name):
            continue
        if path.suffix != ".py":
            # A byte has 256 values, and shards are few by contract.
            bare = re.findall(
                r"^.*[/<>]=? (?!0x|256\b|4096,)\d{3,}\b.*$", path.read_text(encoding="utf-8"), re.MULTILINE
            )
            yield from (f"{name}: a regime without a name: {line.strip()}" for line in bare)
        for constant, base, shift in pairs:
            value = int(base.replace("'", "")) << int(shift or 0)
            if value >= 10 and constant not in FIXED_NUMBERS.get(name, set()):
                yield f"{name}: {constant} is {value}: expected regime(shipped, lowered), or an entry of FIXED_NUMBERS"


def launch_sizes() -> Iterator[str]:
    """Lists of device tensors are cut in Python where a launch ends in C++."""
    header = (ROOT / "fastimpl/csrc/offload/pack.h").read_text(encoding="utf-8")
    python = (ROOT / "fastimpl/offload/packing.py").read_text(encoding="utf-8")
    theirs, ours = (
        re.findall(r"kPackBatch = (\d+)", header),
        re.findall(r"^_DEVICE_BATCH = (\d+)", python, re.MULTILINE),
    )
    if ours != theirs:
        yield f"fastimpl/offload/packing.py: _DEVICE_BATCH is {ours}, kPackBatch in offload/pack.h {theirs}"


def kernels(files: list[Path]) -> Iterator[str]:
    """Kernels written for simt.h touch threads and memory through it alone: what goes around it is not proven."""
    headers = [
        str(path.relative_to(ROOT)) for path in files if path.suffix == ".h" and "conformance/provers" not in str(path)
    ]
    command = [sys.executable, "-P", "conformance/provers/simt/lint.py", *headers]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or done.stderr:
        yield f"conformance/provers/simt/lint.py: exit status {done.returncode}: {done.stderr.strip()}"
    yield from done.stdout.splitlines()


DOCUMENTED_PROGRAMS = {
    "docs/pipeline.md": "conformance/pipeline/documented_program.txt",
    "docs/pretend-device.md": "conformance/meta/pretend_program.txt",
    "docs/race.md": "conformance/meta/race_fetch.txt",
}


def documented_programs() -> Iterator[str]:
    """What a page shows first is what the suite runs."""
    for name, program in DOCUMENTED_PROGRAMS.items():
        page = (ROOT / name).read_text(encoding="utf-8")
        if page.split("```python\n", 1)[1].split("```", 1)[0] != (ROOT / program).read_text(encoding="utf-8"):
            yield f"{name}: its first program is not {program}"
    shown = (ROOT / "conformance/meta/race_fetch_said.txt").read_text(encoding="utf-8")
    if f"```\n{shown}```\n" not in (ROOT / "docs/race.md").read_text(encoding="utf-8"):
        yield "docs/race.md: it does not show conformance/meta/race_fetch_said.txt"
    page = (ROOT / "docs/simt.md").read_text(encoding="utf-8")
    for name in ("reverse.cpp", "reverse.txt"):
        if f"\n{(ROOT / 'conformance/meta/simt' / name).read_text(encoding='utf-8')}```\n" not in page:
            yield f"docs/simt.md: it does not show conformance/meta/simt/{name}"
    kinds = (ROOT / "conformance/provers/simt/include/simt/fault.h").read_text(encoding="utf-8")
    for kind in re.findall(r'\*k\w+ = "([\w-]+)"', kinds):
        if f"`{kind}`" not in page:
            yield f"docs/simt.md: it does not say what {kind} is"


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of every import statement of a file, those in functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.lineno, node.module


def layers(files: list[Path]) -> Iterator[str]:
    """Imports go one way, from later layers to earlier ones."""
    for path in files:
        package = path.relative_to(ROOT).parts[0]
        if path.suffix != ".py" or package not in LAYERS:
            continue
        later = LAYERS[LAYERS.index(package) + 1 :]
        for number, name in imported(path):
            if name.split(".")[0] in later:
                yield f"{path.relative_to(ROOT)}:{number}: {package} imports {name}, which is built upon it"


def distributions(files: list[Path]) -> Iterator[str]:
    """Two of one release: the library, which needs torch and safetensors alone, and the suite, which asks for it."""
    library, suite = (tomllib.loads((ROOT / name).read_text(encoding="utf-8")) for name in DISTRIBUTIONS)
    for (name, expected), content in zip(DISTRIBUTIONS.items(), (library, suite), strict=True):
        got = {place.split("/")[-1] for place in content["tool"]["scikit-build"]["wheel"]["packages"]}
        if got != expected:
            yield f"{name}: got packages {sorted(got)}, expected {sorted(expected)}"
    needs = {re.split(r"\W", line)[0] for line in library["project"]["dependencies"]}
    if needs != LIBRARY_NEEDS:
        yield f"pyproject.toml: got dependencies {sorted(needs)}, expected {sorted(LIBRARY_NEEDS)}"
    version = library["project"]["version"]
    if suite["project"]["version"] != version or f"twinproof=={version}" not in suite["project"]["dependencies"]:
        yield f"conformance/pyproject.toml: its version and the library that it asks for must be {version}"
    allowed = DISTRIBUTIONS["pyproject.toml"] | LIBRARY_NEEDS | set(sys.stdlib_module_names)
    for path in files:
        place = path.relative_to(ROOT)
        if path.suffix != ".py" or place.parts[0] not in DISTRIBUTIONS["pyproject.toml"]:
            continue
        for number, name in imported(path):
            if name.split(".")[0] not in allowed:
                yield f"{place}:{number}: the library does not depend on {name}"


def tests_apart(files: list[Path]) -> Iterator[str]:
    """Nobody imports a test module, whose tests would be collected twice; planted bugs are not listed a second time."""
    for path in files:
        place = path.relative_to(ROOT)
        if path.suffix != ".py" or place.parts[0] not in ("conformance", "perf"):
            continue
        text = path.read_text(encoding="utf-8")
        for line in re.findall(r"^ *(?:from|import) .*", text, re.MULTILINE):
            name = re.search(r"(conformance|perf)\b.*\btest_\w+", line)
            if name:
                yield f"{place}: imports a test module, move what both need to cases or model: {line.strip()}"
        if place.parent.name == "planted" and re.search(r"^PLANTED\b", text, re.MULTILINE):
            yield f"{place}: lists its planted bugs, which @fault and patched() collect"


def reference(files: list[Path]) -> Iterator[str]:
    """The reference is five flat files that fit one sitting, over torch and the safetensors library."""
    found = [path for path in files if path.suffix == ".py" and path.relative_to(ROOT).parts[0] == "refimpl"]
    names = {str(path.relative_to(ROOT / "refimpl")) for path in found}
    if names != REFERENCE_FILES:
        yield f"refimpl: got {sorted(names)}, expected {sorted(REFERENCE_FILES)}"
    count = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in found)
    if count > REFERENCE_LINES_MAX:
        yield f"refimpl: {count} lines, at most {REFERENCE_LINES_MAX}"
    for path in found:
        for number, name in imported(path):
            if name not in REFERENCE_IMPORTS and name.split(".")[0] not in ("twinproof", "refimpl"):
                yield f"{path.relative_to(ROOT)}:{number}: the reference does not need {name}"


def sizes(files: list[Path]) -> Iterator[str]:
    """Python files fit in a head, and the shared ones in a list that one remembers."""
    shared = [path for path in files if path.suffix == ".py" and path.is_relative_to(ROOT / "twinproof")]
    for path in files:
        most = SHARED_LINES_MAX if path in shared else LINES_MAX
        if path.suffix == ".py" and len(path.read_text().splitlines()) > most:
            yield f"{path.relative_to(ROOT)}: longer than {most} lines"
    count = sum(path.name != "__init__.py" for path in shared)
    if count > SHARED_MODULES_MAX:
        yield f"twinproof: {count} modules, at most {SHARED_MODULES_MAX}"


def rooms() -> Iterator[str]:
    """A component with a fast version has its reference, its proof and its price; the reference comes first."""
    for stem in STEMS:
        alive = (ROOT / "fastimpl" / stem).is_dir() or (ROOT / "fastimpl" / f"{stem}.py").exists()
        wanted = [(ROOT / "refimpl" / f"{stem}.py",), (ROOT / "perf" / f"bench_{stem}.py",)]
        wanted += [
            (ROOT / "conformance" / stem / "planted.py", ROOT / "conformance" / stem / "planted" / "__init__.py")
        ]
        for choices in wanted if alive else ():
            if not any(choice.exists() for choice in choices):
                yield f"{stem}: {choices[0].relative_to(ROOT)} is missing"


def machines(files: list[Path]) -> Iterator[str]:
    """No path of one machine, no package host."""
    for path in files:
        if path.name in ("LICENSE", "checks.py") or path.suffix in (".json", ".png", ".safetensors"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if MACHINE.search(line):
                place = f"{path.relative_to(ROOT)}:{number}"
                yield f"{place}: a path of one machine or a package host: {line.strip()[:100]}"


def main(arguments: list[str]) -> int:
    """Check the tree, and the libraries given as arguments."""
    files = tracked()
    found = [
        *stable_includes(files),
        *layers(files),
        *tests_apart(files),
        *reference(files),
        *sizes(files),
        *rooms(),
    ]
    found += distributions(files)
    found += [*messages(), *launch_sizes(), *regimes(files), *kernels(files), *documented_programs(), *machines(files)]
    for library in arguments:
        found += [*undefined_symbols(Path(library)), *unproven_operators(files, Path(library))]
    print("\n".join(found) or f"checks: {len(files)} files, {len(arguments)} libraries, no violation")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
