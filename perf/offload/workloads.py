"""The shapes of the offload bench: ``tensor_count`` parameters, with two optimizer states each."""

from functools import partial

from perf.harness.workloads import Workload

__all__ = ["WORKLOADS"]


_offload = partial(Workload, component="offload", round_count=9)
_256_mib = partial(Workload, component="offload", round_count=9, shape=(1024, 1024), tensor_count=64)
_adam = partial(Workload, component="offload", round_count=9, shape=(4096, 1024), tensor_count=8)
_small = partial(Workload, component="offload", round_count=9, shape=(16, 16), tensor_count=5000)
_gpu_gib = partial(Workload, component="offload", round_count=9, shape=(2048, 2048), tensor_count=32)

WORKLOADS = (
    # On the CPU: what attachment and snapshots cost beside the work itself.
    _256_mib("offload-step-256mib", job="step", contenders=("plain", "attached", "offloaded")),
    _256_mib("offload-step-64mib", job="step", tensor_count=16, contenders=("plain", "attached", "offloaded")),
    _256_mib("offload-snapshot-256mib", job="snapshot", round_count=7, contenders=("ours", "copy", "pickled")),
    _256_mib(
        "offload-snapshot-64mib", job="snapshot", tensor_count=16, round_count=7, contenders=("ours", "copy", "pickled")
    ),
    # Steps of AdamW on the CPU. A byte count first, at the bandwidth of memory; a write of a line that is not in a
    # cache costs a read of it as well. One pass with bfloat16: gradient 2, master and moments 12 are read, 12 + 2
    # written, 2 read for the weight's lines: 30 bytes a parameter. The sequence: gradient 2 + 4 + 4, update 16 + 12,
    # weight 4 + 2 + 2: 46. Prediction: 46 / 30 = 1.53 at the limit of memory. With float32 both move 16 + 12 = 28:
    # prediction 1.0, and more only where torch's kernel is not at that limit.
    _adam("offload-cpu-adam-bf16", job="adam_bf16", contenders=("ours", "sequence", "foreach", "deepspeed")),
    _adam("offload-cpu-adam-fp32", job="adam_fp32", contenders=("ours", "fused", "foreach", "copy", "deepspeed")),
    # 10,000 tensors of 1 KiB that leave for host memory and come back. The floor is two copies of 10 MiB, some 2 ms; a
    # call of torch costs a loop 1 us and more for each tensor and direction, 20 ms at best, and fresh memory for each
    # as much again: 50 ms. Prediction: about 0.5 us for each remain, to hand 10,000 tensors to one operator: 10 ms,
    # 5 times.
    _small("offload-small-1e4", job="small", contenders=("ours", "loop", "copies", "verbs")),
    # A GPU's own: 1 GiB of states in 64 pieces of 16 MiB, 10,000 states of 64 KiB, and steps of 32 chunks. Prediction
    # from rates alone: moves within a tenth of pinned copies, steps within a quarter of a duplex copy, nothing exposed.
    _gpu_gib("offload-gpu-moves-1gib", job="gpu_moves", contenders=("ours", "copy", "loop", "twice")),
    _offload(
        "offload-gpu-moves-1e4",
        job="gpu_moves",
        shape=(128, 128),
        tensor_count=5000,
        contenders=("ours", "copy", "loop", "pinned"),
    ),
    _gpu_gib("offload-gpu-step-1gib", job="gpu_steps", contenders=("ours", "duplex", "serial", "plain", "attached")),
    _gpu_gib("offload-gpu-exposed-1gib", job="gpu_exposed", contenders=("plain", "ours", "blocking", "torchao")),
    # A fused step of as many states. The floor is the plain step, 6 us a parameter, and two copies of 10 MiB; a loop of
    # `.to` adds 60 to 100 ms to it. Views, addresses and bindings of ours, about 1.5 us a state each way, add 30 ms.
    # Prediction: half of the loop; measured: two thirds.
    _small("offload-small-steps-1e4", job="small_steps", contenders=("ours", "loop", "plain")),
    # What the host does for 1,000 states; memory of 50 steps, in states of 9 MiB, which are no power of two; and a
    # state dict.
    _offload(
        "offload-gpu-host-1e3",
        job="gpu_host",
        shape=(128, 128),
        tensor_count=500,
        contenders=("ours", "launches", "loop"),
    ),
    _gpu_gib(
        "offload-gpu-memory-576mib",
        job="gpu_memory",
        shape=(1536, 1536),
        round_count=3,
        contenders=("ours", "whole", "careless"),
    ),
    _gpu_gib(
        "offload-gpu-snapshot-1gib",
        job="gpu_snapshot",
        round_count=7,
        contenders=("ours", "copy", "pickled", "brought"),
    ),
    # The update of 1 GiB of weights in slots: 7 GiB move, 1.6 ms at the rate of a copy; torch's foreach path passes
    # over memory eight times. Prediction: 0.9 of a copy, and a third for the control.
    _gpu_gib(
        "offload-gpu-update-1gib",
        job="gpu_update",
        shape=(4096, 4096),
        tensor_count=16,
        contenders=("ours", "foreach", "copy"),
    ),
    # A step on the pretend device: 16 chunks of 2 parameters. Counts do not depend on sizes.
    _offload(
        "pretend-step-32",
        job="pretend_step",
        shape=(64, 16),
        tensor_count=32,
        round_count=1,
        contenders=("ours", "plain", "careless", "slots"),
    ),
)
