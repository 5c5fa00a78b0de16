"""What must come out of the offload bench; G1 to G12 are the gates of a GPU in docs/offload-limits.md."""

from functools import partial

from perf.harness.gates import claim, counter, limit, memory, regression

__all__ = ["GATES"]

_GPU = ("cuda",)
_UNFUSED = "the control steps unfused"
_INSTALLED = "where it was installed, elsewhere undecided"

_gpu_claim = partial(claim, hardware=_GPU)
_gpu_small = partial(claim, full="offload-gpu-moves-1e4", hardware=_GPU, evidence="G12 of docs/offload-limits.md")
_gpu_limit = partial(limit, hardware=_GPU)
_gpu_moves = partial(limit, hardware=_GPU, peer="copy", ceiling=1.2, control="loop")
_gpu_link = partial(
    counter,
    full="offload-gpu-moves-1gib",
    peer="copy",
    floor=0.9,
    ceiling=1.05,
    control="twice",
    hardware=_GPU,
    evidence="the device's own count, as a share of one pinned copy's in the same run; the control copies twice; "
    "undecided where a device counts none",
)
_gpu_steps_memory = partial(memory, full="offload-gpu-memory-576mib", hardware=_GPU)
_adam_bf16 = partial(claim, full="offload-cpu-adam-bf16", short="offload-cpu-adam-bf16", ceiling=4.0, control="foreach")
_adam_fp32 = partial(claim, full="offload-cpu-adam-fp32", short="offload-cpu-adam-fp32", control="foreach")
_small = partial(
    claim, full="offload-small-1e4", short="offload-small-1e4", peer="loop", floor=3.0, ceiling=30.0, control="copies"
)

_PRETEND = "pretend-step-32"
_counted = partial(counter, full=_PRETEND, short=_PRETEND, test=_PRETEND, control="careless")

GATES = (
    # Attachment and snapshots on the CPU.
    claim(
        "offload-fraction-0",
        "A step with an offloader that moves nothing MUST NOT cost more than 1 % of the plain step.",
        full="offload-step-256mib",
        short="offload-step-64mib",
        subject="attached",
        peer="plain",
        floor=0.99,
        ceiling=1.5,
        control="offloaded",
        evidence="the same arithmetic behind one more call; the control copies the state out and in",
    ),
    limit(
        "offload-snapshot",
        "A snapshot MUST NOT take longer than 1.3 copies of the state's bytes.",
        full="offload-snapshot-256mib",
        short="offload-snapshot-64mib",
        peer="copy",
        floor=0.77,
        ceiling=2.0,
        control="pickled",
        evidence="one copy of each tensor; the control pickles it as well",
    ),
    # Steps on the CPU.
    _adam_bf16(
        "offload-cpu-adam-bf16",
        "A step on the CPU with masters MUST take at most 1/1.3 of the sequence around torch's fused AdamW.",
        peer="sequence",
        floor=1.3,
        evidence=f"46 bytes a parameter against 30 at the limit of memory; {_UNFUSED}",
    ),
    _adam_fp32(
        "offload-cpu-adam-fp32",
        "A step on the CPU MUST NOT take longer than torch's fused AdamW.",
        peer="fused",
        floor=0.97,
        ceiling=3.0,
        evidence=f"both move 28 bytes a parameter; the bound leaves room for noise; {_UNFUSED}",
    ),
    limit(
        "offload-cpu-adam-limit",
        "A step on the CPU MUST reach the rate at which torch copies as many bytes.",
        full="offload-cpu-adam-fp32",
        short="offload-cpu-adam-fp32",
        peer="copy",
        floor=1.0,
        ceiling=4.0,
        control="foreach",
        evidence="a copy reads 14 bytes a parameter, writes 14 and reads the lines that it writes: 42 against 28; "
        "the control passes over the memory several times",
    ),
    # Many small tensors.
    _small(
        "offload-small-verbs",
        "An offloader that brings 10,000 small states to the device and sends them home "
        "MUST take at most a third of a loop of `.to`.",
        subject="verbs",
        evidence="one copy a chunk and direction, every state bound twice; "
        "what remains are views and addresses, about 1 us a tensor; "
        "the control is a loop without allocations and without binding",
    ),
    _small(
        "offload-small-tensors",
        "Offloading 10,000 small tensors and bringing them back MUST take at most a third of a loop of `.to`.",
        evidence="one call packs what a loop copies in as many; the control is a loop without allocations",
    ),
    # From one run to the next, for ``bench compare``.
    regression(
        "offload-small-regression",
        "Against a loop of `.to`, moving 10,000 small states MUST NOT become slower by more than 15 %.",
        full="offload-small-1e4",
        short="offload-small-1e4",
        subject="verbs",
        peer="loop",
        floor=0.85,
        control="copies",
        evidence="ratios of paired runs; the bits of the same life are conformance's; the control is a loop",
    ),
    regression(
        "offload-steps-regression",
        "Against the plain step, one of 10,000 offloaded small states MUST NOT become slower by more than 15 %.",
        full="offload-small-steps-1e4",
        short="offload-small-steps-1e4",
        peer="plain",
        floor=0.85,
        control="loop",
        evidence="ratios of paired runs; the control is a loop of `.to` around the step",
    ),
    # A GPU.
    _gpu_moves(
        "offload-gpu-move-rate",
        "Offloading states of 16 MiB and bringing them back MUST reach 0.9 of pinned copies of the same run.",
        full="offload-gpu-moves-1gib",
        floor=0.9,
        evidence="G1 of docs/offload-limits.md; the control is a pageable loop of .to",
    ),
    _gpu_moves(
        "offload-gpu-small-rate",
        "Offloading 10,000 states of 64 KiB and bringing them back MUST reach 0.6 of one pinned copy of the same run.",
        full="offload-gpu-moves-1e4",
        floor=0.6,
        evidence="G2 of docs/offload-limits.md; the control is a pageable loop of .to",
    ),
    _gpu_limit(
        "offload-gpu-duplex-step",
        "A step of 32 chunks MUST take at most 1.25 of a duplex copy of its states in the same run.",
        full="offload-gpu-step-1gib",
        peer="duplex",
        floor=0.8,
        ceiling=1.2,
        control="serial",
        evidence="G3 of docs/offload-limits.md; the control copies, steps and copies on one stream",
    ),
    _gpu_limit(
        "offload-gpu-slot-update",
        "The update of a chunk in its slot MUST reach 0.8 of a copy of the device in the same run.",
        full="offload-gpu-update-1gib",
        peer="copy",
        floor=0.8,
        ceiling=1.2,
        control="foreach",
        evidence="one pass over weight, gradient and moments; the control is torch's foreach step",
    ),
    _gpu_claim(
        "offload-gpu-exposed",
        "At most 5 % of a step MUST be exposed where forward and backward take as long as the transfers, each.",
        full="offload-gpu-exposed-1gib",
        peer="plain",
        floor=0.95,
        ceiling=1.1,
        control="blocking",
        evidence="G4 of docs/offload-limits.md; the control waits for every copy",
    ),
    _gpu_claim(
        "offload-gpu-fraction-0",
        "A step with an offloader that moves nothing MUST NOT cost more than 1 % of the plain step.",
        full="offload-gpu-step-1gib",
        subject="attached",
        peer="plain",
        floor=0.99,
        ceiling=1.5,
        control="ours",
        evidence="G5 of docs/offload-limits.md; an H200 took 0.1 ms more for a step of 1.6 ms, which the host needs to "
        "look at 32 parameters; the control moves everything",
    ),
    # DeepSpeed's CPU Adam, where it is installed.
    _adam_bf16(
        "offload-cpu-adam-bf16-deepspeed",
        "A step on the CPU with masters MUST take at most 1/1.2 of the sequence around DeepSpeed's CPU Adam.",
        peer="deepspeed",
        floor=1.2,
        evidence=f"46 bytes a parameter against 30: 1.46 [1.41, 1.53] {_INSTALLED}; {_UNFUSED}",
    ),
    _adam_fp32(
        "offload-cpu-adam-fp32-deepspeed",
        "A float32 step on the CPU MUST take at most a ninth longer than DeepSpeed's CPU Adam.",
        peer="deepspeed",
        floor=0.9,
        ceiling=3.0,
        evidence="both are one pass at the limit of memory: 1.12 [1.07, 1.15] and 0.98 [0.94, 1.09] "
        f"{_INSTALLED}; {_UNFUSED}",
    ),
    claim(
        "offload-small-steps",
        "A step of 10,000 offloaded small states MUST take at most four fifths of one with a loop of `.to` around it.",
        full="offload-small-steps-1e4",
        short="offload-small-steps-1e4",
        peer="loop",
        floor=1.25,
        ceiling=10.0,
        control="loop",
        evidence="a chunk is bound in one go, there and back; both contain the plain step, which is half of ours: "
        "1.5 was measured, 0.6 with a view for each tensor; the control is the loop itself",
    ),
    # A GPU: the time of the host, memory and the link.
    _gpu_limit(
        "offload-gpu-host-time",
        "offload() and prefetch() MUST NOT take the host longer than to queue one copy for each tensor and direction.",
        full="offload-gpu-host-1e3",
        peer="launches",
        floor=1.0,
        ceiling=100.0,
        control="loop",
        evidence="G6 of docs/offload-limits.md, whose 3 us for each tensor are one launch, measured in the same run; "
        "the control waits",
    ),
    counter(
        "offload-gpu-host-waits",
        "Neither offload() nor prefetch() MUST make the host wait for the device.",
        full="offload-gpu-host-1e3",
        metric="wait_count",
        ceiling=0,
        control="loop",
        hardware=_GPU,
        evidence="G6 of docs/offload-limits.md, by torch's sync debug mode, which does not see waits for events; "
        "the control waits for each tensor",
    ),
    _gpu_steps_memory(
        "offload-gpu-step-peak",
        "A step MUST NOT hold more than its two slots, 2 % and 32 MiB.",
        metric="peak_bytes",
        ceiling="1.02 * 4 * tensor_bytes + 32 * 1048576",
        control="whole",
        evidence="G7 of docs/offload-limits.md, over weights and gradients; a chunk is the two states of a parameter; "
        "the control brings all states at once",
    ),
    _gpu_steps_memory(
        "offload-gpu-reserved-growth",
        "Reserved memory MUST NOT grow from the third step to the fiftieth.",
        metric="growth_bytes",
        ceiling=0,
        control="careless",
        evidence="G8 of docs/offload-limits.md; the control makes a stream for each step",
    ),
    _gpu_steps_memory(
        "offload-gpu-device-growth",
        "NVML MUST NOT count 16 MiB more of the device as used after the fiftieth step than after the second.",
        metric="nvml_growth_bytes",
        ceiling="16 * 1048576",
        control="careless",
        evidence="what torch's allocator does not count is in it, and what other processes take: "
        "the bound is eight pages of 2 MiB; the control makes a stream for each step",
    ),
    _gpu_link(
        "offload-gpu-pcie-out",
        "Offloading states and bringing them back MUST send at most 1.05 of their bytes to the host.",
        metric="pcie_tx_bytes",
    ),
    _gpu_link(
        "offload-gpu-pcie-in",
        "Offloading states and bringing them back MUST receive at most 1.05 of their bytes from the host.",
        metric="pcie_rx_bytes",
    ),
    _gpu_steps_memory(
        "offload-gpu-pinned",
        "Pinned memory MUST NOT be more than 1.02 of the states.",
        metric="pinned_bytes",
        ceiling="1.02 * 2 * payload_bytes",
        control="careless",
        evidence="G9 of docs/offload-limits.md; the control pins each state with torch, "
        "which rounds up to a power of two",
    ),
    memory(
        "offload-gpu-snapshot-peak",
        "A state dict of offloaded states MUST NOT take more of the device than a chunk.",
        full="offload-gpu-snapshot-1gib",
        metric="peak_bytes",
        ceiling="2 * tensor_bytes",
        control="brought",
        hardware=_GPU,
        evidence="G10 of docs/offload-limits.md; the control brings the states back first",
    ),
    _gpu_limit(
        "offload-gpu-snapshot",
        "A state dict of offloaded states MUST NOT take longer than 1.3 host copies of their bytes.",
        full="offload-gpu-snapshot-1gib",
        peer="copy",
        floor=0.77,
        ceiling=2.0,
        control="pickled",
        evidence="G10 of docs/offload-limits.md; the control pickles it as well",
    ),
    _gpu_small(
        "offload-gpu-small-loop",
        "Moving 10,000 states of 64 KiB MUST be 10 times as fast as a pageable loop.",
        peer="loop",
        floor=10.0,
        ceiling=500.0,
        control="loop",
    ),
    _gpu_small(
        "offload-gpu-small-pinned",
        "Moving 10,000 states of 64 KiB MUST be 1.5 times as fast as a loop to one pinned block.",
        peer="pinned",
        floor=1.5,
        ceiling=20.0,
        control="pinned",
    ),
    # The pretend device: counts of the host's own, of any machine.
    _counted(
        "offload-pretend-step-waits",
        "In a step with an offloader the host MUST wait for the device at most twice, however many chunks there are.",
        metric="wait_count",
        ceiling=2,
        evidence="once for each slot, whose last copy out is waited for before its memory is asked for again",
    ),
    _counted(
        "offload-pretend-verb-waits",
        "offload() and prefetch() together MUST make the host wait for the device at most twice.",
        metric="verb_wait_count",
        ceiling=2,
        evidence="a bound that must not grow: waits for events, which torch's sync debug mode does not see",
    ),
    _counted(
        "offload-pretend-pageable",
        "No copy of a step MUST run from or to pageable memory.",
        metric="pageable_count",
        ceiling=0,
        evidence="homes of states are pinned",
    ),
    _counted(
        "offload-pretend-sent",
        "A step MUST copy each state to the device once, to the byte.",
        metric="to_device_bytes",
        ceiling="2 * payload_bytes",
        evidence="two moments; step counters of fused AdamW stay on the device",
    ),
    _counted(
        "offload-pretend-brought",
        "A step MUST copy each state to the host once, to the byte.",
        metric="to_host_bytes",
        ceiling="2 * payload_bytes",
        evidence="two moments; step counters of fused AdamW stay on the device",
    ),
    _counted(
        "offload-pretend-copies",
        "A step of 16 chunks MUST take one copy for each chunk and direction.",
        metric="copy_count",
        ceiling=32,
        evidence="a chunk lies in one piece on both sides; the control copies every parameter there and back",
    ),
    _counted(
        "offload-pretend-updates",
        "A step of 16 chunks that one kernel updates MUST take one operator on the device for each.",
        subject="slots",
        metric="launch_count",
        ceiling=16,
        evidence="all parameters and states of a chunk in one call; torch's foreach step takes 8 a chunk and more",
    ),
    _counted(
        "offload-pretend-launches",
        "A step of 16 chunks MUST take at most 32 operators on the device.",
        metric="launch_count",
        ceiling=32,
        evidence="a bound that must not grow; the plain step has 2, and so has each chunk's",
    ),
)
