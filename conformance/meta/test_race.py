"""The race prover is silent on right programs, and names both lines of each program with an edge taken out."""

from __future__ import annotations

import copy
import json
import re
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from conformance.harness import Mismatch
from conformance.harness.cli import main
from conformance.provers.race import Report, to_html, to_svg, watch
from twinproof.errors import UnsupportedError

_TEXT = Path(__file__).with_name("race_programs.txt")
_EDGE = re.compile(r"# -(\d+) ([a-z-]+)$")


def _programs() -> dict[str, list[str]]:
    parts = re.split(r"^== (.*)\n", _TEXT.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {title: body.splitlines() for title, body in zip(parts[::2], parts[1::2], strict=True)}


PROGRAMS = _programs()


@pytest.fixture(autouse=True)
def _without_cuda() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        pytest.skip("CUDA is in use in this process; the prover refuses to stand in front of it")


@pytest.fixture(autouse=True)
def _beside_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A report names files from the current folder on.
    monkeypatch.chdir(tmp_path)


def _edges() -> Iterator[tuple[str, str, str]]:
    for title, lines in PROGRAMS.items():
        for line in lines:
            found = _EDGE.search(line)
            if found is not None:
                yield title, found.group(1), found.group(2)


def _ran(title: str, lines: list[str], path: Path) -> Report:
    path.write_text("\n".join(["import torch", *lines]) + "\n", encoding="utf-8")
    with watch() as report:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": title})
    return report


def _lines_marked(lines: list[str], mark: str) -> set[int]:
    # The first line of a program is the import.
    return {number for number, line in enumerate(lines, start=2) if re.search(rf"#.*\b{mark}\b", line)}


@pytest.mark.parametrize("title", PROGRAMS)
def test_right_programs_have_no_hazard(title: str, tmp_path: Path) -> None:
    report = _ran(title, PROGRAMS[title], tmp_path / "program.py")
    assert report.hazards == [], report.text()
    assert report.status(accept=("time",)) == 0, report.text()


@pytest.mark.parametrize(("title", "edge", "kind"), list(_edges()))
def test_each_edge_is_missed_with_both_lines(title: str, edge: str, kind: str, tmp_path: Path) -> None:
    lines = [re.sub(r"\S.*", "pass", line) if f"# -{edge} " in line else line for line in PROGRAMS[title]]
    report = _ran(title, lines, tmp_path / "program.py")
    found = {
        (hazard.kind, hazard.first.site.point.line, hazard.second.site.point.line)
        for hazard in report.hazards
        if hazard.first.site is not None and hazard.second.site is not None
    }
    wanted = {(kind, a, b) for a in _lines_marked(lines, f"a{edge}") for b in _lines_marked(lines, f"b{edge}")}
    assert wanted, "the program marks no lines for this edge"
    assert wanted <= found, report.text()
    assert report.status(accept=("time",)) == 1


def test_a_hazard_says_everything(tmp_path: Path) -> None:
    program = [
        "side = torch.cuda.Stream()",
        "def step(x):",
        "    with torch.cuda.stream(side):",
        "        x.mul_(2)",
        "for _ in range(3):",
        "    step(torch.ones(8, device='cuda'))",
    ]
    report = _ran("loop", program, tmp_path / "program.py")
    race = report.hazards[0]
    assert (race.kind, race.count, race.points) == ("race", 3, ("program.py:7", "program.py:5"))
    first, second = report.to_json()["hazards"][0]["first"], report.to_json()["hazards"][0]["second"]
    assert (first["op"], first["line"], first["stream"], first["writes"]) == ("ones", 7, "the default stream", True)
    assert (second["op"], second["line"], second["function"]) == ("mul_", 5, "step")
    assert second["stream"] == "stream-1 (made at program.py:2)"
    assert first["file"] == str(tmp_path / "program.py")
    text = report.text()
    assert "hazard 1: race, 3 times" in text
    assert "mul_ at program.py:5 step, stream-1 (made at program.py:2) writes" in text
    assert "of device memory of the default stream, made by ones at program.py:7" in text
    with pytest.raises(Mismatch, match="not proven free of races"):
        report.check()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("if x.sum() > 0: pass", "value"),
        ("x.sum().item()", "value"),
        ("x.nonzero()", "value"),
        ("torch.linalg.inv(torch.eye(2, device='cuda'))", "value"),
        ("x[x > 0]", "value"),
        ("x[x > 0] = x[0]", "value"),
        ("torch.repeat_interleave(x.long())", "value"),
        ("torch.nn.functional.one_hot(x.long())", "value"),
        ("print(x)", "value"),
        ("torch.cuda.current_stream().record_event().query()", "time"),
        ("torch.cuda.current_stream().query()", "time"),
        ("s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream()); s.record_event().query()", "time"),
        ("x.data_ptr()", "address"),
        ("torch.ones(8, pin_memory=True).numpy()", "address"),
        ("torch.cuda.current_stream().cuda_stream", "address"),
        ("x + torch.ones(8)", "place"),
        ("x[torch.arange(2, device='cuda')] = torch.ones(2)", "place"),
        ("torch.compile(lambda y: y + 1)(x)", "bypass"),
    ],
)
def test_what_cannot_be_judged_is_not_passed(line: str, kind: str, tmp_path: Path) -> None:
    report = _ran("gap", ["x = torch.ones(8, device='cuda')", line], tmp_path / "program.py")
    assert report.hazards == []
    assert {(gap.kind, gap.site.point.line) for gap in report.not_covered} == {(kind, 3)}
    assert report.status() == 2
    # What bypasses the prover cannot be waved through.
    assert report.status(accept=(kind,)) == (2 if kind == "bypass" else 0)
    assert "not judged" in report.text()
    assert ("(accepted)" in report.text(accept=(kind,))) == (kind != "bypass")


def test_the_count_of_a_mask_is_waited_for_and_its_rows_are_not(tmp_path: Path) -> None:
    lines = ["side, x = torch.cuda.Stream(), torch.ones(8, device='cuda')", "host = x.to('cpu', non_blocking=True)"]
    lines += ["rows = x[x > 0]", "host.sum()", "with torch.cuda.stream(side):", "    rows.mul_(2)"]
    report = _ran("mask", lines, tmp_path / "program.py")
    assert [(hazard.kind, hazard.points) for hazard in report.hazards] == [("race", ("program.py:4", "program.py:7"))]


def test_calls_that_are_not_modelled_raise(tmp_path: Path) -> None:
    with watch() as report, pytest.raises(UnsupportedError, match="CUDAGraph"):
        torch.cuda.CUDAGraph()
    assert [gap.kind for gap in report.not_covered] == ["bypass"]
    with watch(), pytest.raises(UnsupportedError, match="second device"):
        torch.ones(1, device="cuda:1")


def test_a_program_without_a_device_is_not_judged(tmp_path: Path) -> None:
    report = _ran("host", ["torch.ones(8).sum()"], tmp_path / "program.py")
    assert report.status() == 2
    assert "gave no work to a device" in report.text()


def test_torch_is_itself_again() -> None:
    before = (torch.cuda.Stream, torch.Stream, torch.cuda.current_stream, torch.compile, threading.Thread.start)
    with watch():
        assert torch.cuda.is_available()
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert before[0] is not torch.cuda.Stream
        with pytest.raises(UnsupportedError, match="a watch within a watch"), watch():
            pass
    after = (torch.cuda.Stream, torch.Stream, torch.cuda.current_stream, torch.compile, threading.Thread.start)
    assert before == after
    assert "record_stream" not in vars(torch.Tensor)
    assert "resize_" not in vars(torch.UntypedStorage)


def test_tensors_say_where_they_are_and_hold_right_values() -> None:
    torch.manual_seed(0)
    model, data = torch.nn.Linear(3, 5), torch.randn(7, 3)
    twin = copy.deepcopy(model)
    with watch() as report:
        model.cuda()
        moved = copy.deepcopy(model)
        for module, given in ((moved, data.cuda()), (twin, data)):
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                torch.nn.functional.gelu(module(given)).pow(2).sum().backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
        weight = moved.weight
        assert weight.is_cuda
        assert (weight.device, weight.grad.device) == (torch.device("cuda", 0),) * 2  # type: ignore[union-attr]
        assert not data.is_cuda
        assert weight.cpu().device == torch.zeros_like(weight, device="cpu").device == torch.device("cpu")
        assert torch.zeros_like(data, device="cuda").is_cuda
        assert torch.tensor([1.0], device="cuda").is_cuda
        assert weight.to(torch.float64).is_cuda
        assert data.to(weight).is_cuda
        assert weight.new_zeros(2).is_cuda
        assert data.pin_memory().is_pinned()
        assert not data.is_pinned()
        with pytest.raises(TypeError, match="cpu"):
            weight.detach().numpy()
    assert report.hazards == []
    for mine, theirs in zip(moved.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_go_back_to_where_leaves_are() -> None:
    with watch() as report:
        leaf = torch.ones(4, requires_grad=True)
        (leaf.to("cuda", non_blocking=True) * 3).sum().backward()  # type: ignore[no-untyped-call]
        assert not leaf.grad.is_cuda  # type: ignore[union-attr]
        assert leaf.grad.tolist() == [3.0] * 4  # type: ignore[union-attr]
    assert report.hazards == []


def test_memory_that_was_made_elsewhere_is_the_hosts() -> None:
    before = torch.ones(4)
    with watch() as report:
        ours, shared = torch.ones(4, device="cuda"), torch.from_numpy(numpy.ones(4, dtype="float32"))
        for one in (before, shared):
            one.copy_(ours, non_blocking=True)
            assert not one.is_cuda
            assert ours.copy_(one).is_cuda
        shared.sum()
    assert [hazard.kind for hazard in report.hazards] == []
    with watch() as report:
        before.copy_(torch.ones(4, device="cuda"), non_blocking=True)
        before.sum()
    assert [hazard.kind for hazard in report.hazards] == ["host-read"]


def test_what_training_loops_use_works() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    with watch() as report:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).to("cuda")
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
        for given, wanted in torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True):
            assert given.is_pinned()
            with torch.autocast("cuda"):
                middle = torch.utils.checkpoint.checkpoint(model[0], given.cuda(non_blocking=True), use_reentrant=False)
                out = model[1](middle)
            assert out.dtype == torch.float16
            loss = torch.nn.functional.mse_loss(out.float(), wanted.cuda(non_blocking=True))
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert report.hazards == [], report.text()
    # The scaler asks whether a gradient overflowed.
    assert {gap.kind for gap in report.not_covered} == {"value"}


def test_what_is_loaded_lies_where_it_is_wanted(tmp_path: Path) -> None:
    file = tmp_path / "saved.pt"
    with watch() as report:
        torch.save({"x": torch.ones(3, device="cuda"), "host": torch.ones(3)}, file)
        found = torch.load(file)
        assert (found["x"].is_cuda, found["host"].is_cuda) == (True, False)
        for place in ("cuda", "cuda:0", torch.device("cuda"), lambda storage, location: storage.cuda()):
            there = torch.load(file, map_location=place)
            assert all(one.is_cuda for one in there.values())
            assert there["x"].tolist() == there["host"].tolist() == [1.0] * 3
        here = torch.load(file, map_location="cpu")
        assert not any(one.is_cuda for one in here.values())
        assert isinstance(torch.cuda.device("cuda"), torch.cuda.device)
        of_tensor = torch.cuda.device_of(found["x"])  # type: ignore[no-untyped-call]
        for context in (torch.cuda.device(0), of_tensor, torch.accelerator.device_index(0)):
            with context:
                pass
    assert report.hazards == []


def test_what_is_made_from_another_lies_beside_it() -> None:
    with watch() as report:
        here, there = torch.ones(3, dtype=torch.float64), torch.ones(3, device="cuda")
        made = [here.type_as(there), there.new_tensor([1.0]), there.new_tensor(here), there.new([1.0]), there.new(2)]
        assert all(one.is_cuda for one in (*made, here.type("torch.cuda.FloatTensor"), there.type(torch.float16)))
        made = [there.type_as(here), here.new_tensor(there), there.new_tensor([1.0], device="cpu"), here.new([1.0])]
        assert not any(one.is_cuda for one in (*made, there.type("torch.FloatTensor")))
        assert (there.type(), here.type_as(there).dtype) == ("torch.cuda.FloatTensor", torch.float32)
        assert {here.to("meta").device, there.to("meta").device} == {torch.device("meta")}
        picture = torch.ones(2, 3, 4, 4).to("cuda", memory_format=torch.channels_last)
        assert picture.is_contiguous(memory_format=torch.channels_last)
        torch.set_default_device("cuda")
        try:
            assert all(one.is_cuda for one in (torch.tensor([1.0]), torch.ones(1), torch.as_tensor([1])))
            assert not torch.tensor([1.0], device="cpu").is_cuda
        finally:
            torch.set_default_device(None)
        packed = torch.nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4, device="cuda"), torch.tensor([3, 2]))
        assert (packed.data.is_cuda, packed.batch_sizes.is_cuda) == (True, False)
        out, _ = torch.nn.LSTM(4, 4).cuda()(packed)
        padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(out)
        assert (padded.is_cuda, lengths.is_cuda) == (True, False)
        assert there.numpy(force=True).tolist() == [1.0] * 3
    assert report.hazards == []
    assert report.not_covered == []


def test_what_stands_around_streams_works() -> None:
    with watch() as report:
        generator = torch.Generator(device="cuda")
        assert isinstance(generator, torch.Generator)
        assert isinstance(torch.default_generator, torch.Generator)
        assert (generator.device, torch.Generator().device) == (torch.device("cuda", 0), torch.device("cpu"))
        assert torch.randn(2, device="cuda", generator=generator).is_cuda
        with torch.random.fork_rng():
            first = torch.randn(2, device="cuda")
        assert torch.equal(torch.randn(2), first.cpu())
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        with torch.cuda.nvtx.range("a"):
            torch.cuda.Event(True, False, False).record()  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats(device=0)
        assert torch.cuda.max_memory_allocated(device="cuda") == torch.cuda.memory.memory_allocated(0) > 0
        assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
        assert torch.get_device_module() is torch.cuda
        leaf = torch.ones(2, device="cuda", requires_grad=True)
        edge = torch.autograd.graph.get_gradient_edge(leaf * 2)
        torch.autograd.backward((edge,), (torch.ones(2, device="cuda"),))
        assert leaf.grad is not None
    assert torch.Generator is torch._C.Generator
    assert report.hazards == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.func.vmap(lambda row: row * 2)(x)",
        "torch.func.grad(lambda all: (all * all).sum())(x)",
        "torch.func.jvp(lambda all: all * 2, (x,), (x,))",
        "x.to_sparse_csr()",
        "torch.nested.nested_tensor([x, x]) * 2",
        "torch.nested.nested_tensor([x, x], layout=torch.jagged) * 2",
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:`torch.jit.script`", "ignore:Sparse CSR")
def test_transforms_and_nested_tensors_are_watched(line: str, tmp_path: Path) -> None:
    lines = ["side, x = torch.cuda.Stream(), torch.ones(4, 4, device='cuda')", "torch.cuda.synchronize()"]
    lines += ["with torch.cuda.stream(side):", "    x.mul_(2)", line]
    report = _ran("transform", lines, tmp_path / "program.py")
    assert {(hazard.kind, hazard.points) for hazard in report.hazards} == {("race", ("program.py:5", "program.py:6"))}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_transfers_that_are_not_modelled_raise() -> None:
    for line in ("torch.func.vmap(lambda row: row.cpu())(x)", "x.to_sparse_csr().cpu()"):
        lines = ["x = torch.ones(4, 4, device='cuda')", line]
        with watch() as report, pytest.raises(UnsupportedError, match="a transfer"):
            exec(compile("\n".join(lines), "program.py", "exec"), {"torch": torch})
        assert "bypass" in {gap.kind for gap in report.not_covered}


def test_pageable_memory_is_named() -> None:
    with watch() as report:
        batch = torch.ones(8)
        batch.to("cuda", non_blocking=True)
        batch.zero_()
    assert [hazard.is_pageable for hazard in report.hazards] == [True]
    assert "pageable: CUDA says only that such a copy might wait" in report.text()


def test_hooks_run_on_the_stream_of_their_node() -> None:
    seen = []
    with watch():
        side, weight = torch.cuda.Stream(), torch.ones(4, device="cuda", requires_grad=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            product = weight * 2
            product.register_hook(lambda grad: seen.append((torch.cuda.current_stream(), grad.device.type)))  # type: ignore[no-untyped-call]
            loss = product.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert seen == [(side, "cuda")]


def test_backward_begins_at_leaves_and_at_edges() -> None:
    with watch() as report:
        side, leaf = torch.cuda.Stream(), torch.ones((), device="cuda", requires_grad=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            product = leaf * 2
        torch.cuda.current_stream().wait_stream(side)
        torch.autograd.backward([torch.autograd.graph.get_gradient_edge(product)], [torch.ones((), device="cuda")])
        # The product keeps the leaf's node, whose stream waits for the caller's, and is joined.
        leaf.backward()  # type: ignore[no-untyped-call]
        leaf.grad.add_(1)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones((), device="cuda").backward()  # type: ignore[no-untyped-call]
    assert report.hazards == [], report.text()


def test_notes_of_a_watch_are_not_the_next_ones() -> None:
    seen = []
    with watch():
        weight = torch.ones(4, device="cuda", requires_grad=True)
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            kept = weight * 2
    with watch():
        weight.register_hook(lambda _: seen.append(torch.cuda.current_stream()))  # type: ignore[no-untyped-call]
        kept.sum().backward()  # type: ignore[no-untyped-call]
        assert seen == [torch.cuda.default_stream()]


def test_calls_have_the_arguments_of_torch() -> None:
    x = torch.ones(4)
    with watch() as report:
        assert isinstance(torch.cuda.device(0), torch.cuda.device)
        with torch.cuda.device(0), torch.cuda.device_of(x), torch.accelerator.device_index(0):  # type: ignore[no-untyped-call]
            y = x.cuda()
        torch.cuda.Event(True, False, False).record()  # type: ignore[no-untyped-call]
        torch.Event("cuda", enable_timing=True).record()
        assert torch.cuda.max_memory_allocated(device=0) >= torch.cuda.memory_allocated(device="cuda") == 16
        assert torch.cuda.get_device_capability(device=0) == (9, 0)
        torch.cuda.memory.reset_peak_memory_stats(device=0)
        with torch.cuda.nvtx.range("copy"):
            torch.cuda.nvtx.mark("here")  # type: ignore[no-untyped-call]
        with torch.random.fork_rng():
            first = torch.rand(4, device="cuda")
        state = torch.cuda.get_rng_state()
        second = torch.rand(4, device="cuda")
        torch.cuda.set_rng_state(state)
        third = torch.rand(4, device="cuda")
    assert torch.equal(y, x)
    assert torch.equal(first, second)
    assert torch.equal(second, third)
    assert report.hazards == []


def test_collectives_have_a_stream_of_their_own(tmp_path: Path) -> None:
    with watch() as report:
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        try:
            x = torch.ones(8, device="cuda")
            dist.all_reduce(x)
            x.add_(1)
            work = dist.all_reduce(x, async_op=True)
            x.mul_(2)
            work.wait()
            x.add_(1)
        finally:
            dist.destroy_process_group()
    found = [(hazard.kind, {hazard.first.stream, hazard.second.stream}) for hazard in report.hazards]
    assert found == [("race", {"nccl", "default"})], report.text()


def test_the_picture_names_hazards_in_words(tmp_path: Path) -> None:
    title = "wait_stream both ways"
    lines = [line for line in PROGRAMS[title] if "# -1 " not in line]
    report = _ran(title, lines, tmp_path / "program.py")
    picture = to_svg(report)
    root = ElementTree.fromstring(picture)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text.startswith("stream-1")]
    assert sum(text == "HAZARD 1" for text in texts) == 2
    assert any(text.startswith("HAZARD 1, race: ones at program.py:3") for text in texts)
    boxes = [element for element in root.iter("{http://www.w3.org/2000/svg}rect") if "bad" in element.get("class", "")]
    assert len(boxes) == 2
    assert "<svg" in to_html(report)
    assert "hazard 1: race" in to_html(report)


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    right, wrong, broken = (tmp_path / f"{name}.py" for name in ("right", "wrong", "broken"))
    lines = ["import sys", "print(sys.argv[1:])", *PROGRAMS["wait_stream both ways"]]
    right.write_text("\n".join(["import torch", *lines]))
    wrong.write_text("\n".join(["import torch", *(line for line in lines if "# -1 " not in line)]))
    broken.write_text("import torch\ntorch.ones(2, device='cuda') + torch.ones(3, device='cuda')\n")
    assert main(["race", str(right), "--json", "x"]) == 0
    said = capfd.readouterr().out
    assert said.startswith("['--json', 'x']\n")
    assert "no hazard: 3 launches on 2 streams" in said
    picture = tmp_path / "pictures" / "trace.svg"
    assert main(["race", "--json", "--trace", str(picture), str(wrong)]) == 1
    found = json.loads(capfd.readouterr().out)
    assert (found["status"], [hazard["kind"] for hazard in found["hazards"]]) == (1, ["race"])
    assert picture.read_text().startswith("<svg")
    assert main(["race", str(broken)]) == 2
    assert "the program failed: RuntimeError" in capfd.readouterr().out
    assert main(["race", str(tmp_path / "none.py")]) == 2
    assert main(["race", "--trace", "x.png", str(right)]) == 2


def test_the_page_shows_what_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # ci/checks.py compares the page with these two files.
    script = tmp_path / "fetch.py"
    script.write_text(_TEXT.with_name("race_fetch.txt").read_text(encoding="utf-8"), encoding="utf-8")
    assert main(["race", str(script)]) == 1
    assert capfd.readouterr().out == _TEXT.with_name("race_fetch_said.txt").read_text(encoding="utf-8")


_EXAMPLE = Path(__file__).parents[2] / "examples" / "race_prefetch.py"


@pytest.mark.skipif(not _EXAMPLE.is_file(), reason="examples are not installed")
@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ([], []),
        (["--forget", "wait"], ["race", "race"]),
        (["--forget", "record"], ["released"]),
        (["--forget", "synchronize"], ["host-write"]),
        (["--forget", "read"], ["host-read"]),
    ],
)
def test_the_example(words: list[str], kinds: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["race", "--json", str(_EXAMPLE), *words]) == bool(kinds)
    assert [hazard["kind"] for hazard in json.loads(capfd.readouterr().out)["hazards"]] == kinds
