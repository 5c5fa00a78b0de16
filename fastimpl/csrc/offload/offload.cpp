// CPU launchers of the offload operators: everything is checked first, then blocks of elements go to the threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <vector>

#include "common/regimes.h"
#include "offload/adam.h"
#include "offload/args.h"
#include "offload/slot.h"

namespace {

using namespace fastimpl;
using namespace fastimpl::offload;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

constexpr size_t kHyperWords = 9;
// Of one block: large enough that handing it out costs nothing, small enough that the last ones even out.
constexpr int64_t kBlockElements = regime(1 << 16, 40);

Float float_of(const Tensor& t, const char* name) {
  if (t.scalar_type() == ScalarType::Float) return Float::kFloat32;
  if (t.scalar_type() == ScalarType::Half) return Float::kFloat16;
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::BFloat16, name, ": not float32, float16 or bfloat16");
  return Float::kBFloat16;
}

// All of a list have the form of their master, lie on the CPU and are of one dtype; float32 unless `any_float`.
void check_list(const Tensors& list, const Tensors& masters, bool any_float, const char* name) {
  STD_TORCH_CHECK(list.size() == masters.size(), name, ": got ", list.size(), " tensors for ", masters.size(),
                  " masters");
  for (size_t i = 0; i < list.size(); ++i) {
    STD_TORCH_CHECK(list[i].is_cpu() && have_same_order(list[i], masters[i]), name, " ", i,
                    ": not a CPU tensor with the shape and strides of its master");
    STD_TORCH_CHECK(
        any_float ? list[i].scalar_type() == list[0].scalar_type() : list[i].scalar_type() == ScalarType::Float, name,
        " ", i, any_float ? ": not of one dtype with the others" : ": not float32");
  }
}

struct Block {
  AdamSlice slice;
  int64_t begin, count;
};

void adam_step_cpu(Tensors grads, Tensors masters, Tensors averages, Tensors squares, Tensors square_maxima,
                   Tensors weights, std::vector<double> hyper, bool maximize, bool coupled, int64_t isa) {
  check_list(masters, masters, false, "masters");
  check_list(grads, masters, true, "grads");
  check_list(averages, masters, false, "exp_avgs");
  check_list(squares, masters, false, "exp_avg_sqs");
  if (!square_maxima.empty()) check_list(square_maxima, masters, false, "max_exp_avg_sqs");
  if (!weights.empty()) check_list(weights, masters, true, "weights");
  STD_TORCH_CHECK(hyper.size() == kHyperWords, "hyper: got ", hyper.size(), " values, expected ", kHyperWords);
  const auto best = static_cast<int64_t>(best_isa());
  STD_TORCH_CHECK(isa >= -1 && isa <= best, "isa: got ", isa, ", this machine has -1 to ", best);
  if (masters.empty()) return;
  std::vector<Block> blocks;
  for (size_t i = 0; i < masters.size(); ++i) {
    STD_TORCH_CHECK(is_dense(masters[i]), "masters ", i, ": has gaps");
    const AdamSlice slice{grads[i].data_ptr(),
                          static_cast<float*>(masters[i].data_ptr()),
                          static_cast<float*>(averages[i].data_ptr()),
                          static_cast<float*>(squares[i].data_ptr()),
                          square_maxima.empty() ? nullptr : static_cast<float*>(square_maxima[i].data_ptr()),
                          weights.empty() ? nullptr : weights[i].data_ptr()};
    const int64_t numel = masters[i].numel();
    for (int64_t at = 0; at < numel; at += kBlockElements)
      blocks.push_back({slice, at, numel - at < kBlockElements ? numel - at : kBlockElements});
  }
  const Float grad = float_of(grads[0], "grads"),
              weight = weights.empty() ? Float::kFloat32 : float_of(weights[0], "weights");
  float h[kHyperWords];
  for (size_t i = 0; i < kHyperWords; ++i) h[i] = static_cast<float>(hyper[i]);
  const AdamHyper words{h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7], h[8]};
  const Isa chosen = isa < 0 ? static_cast<Isa>(best) : static_cast<Isa>(isa);
  torch::stable::parallel_for(0, static_cast<int64_t>(blocks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Block& block = blocks[static_cast<size_t>(i)];
      adam_step(grad, weight, chosen, block.slice, block.begin, block.count, words, {maximize, coupled});
    }
  });
}

void slot_step_cpu(int64_t kind, Tensors params, Tensors grads, Tensors first, Tensors second, Tensors third,
                   std::vector<int64_t> hyper_of, std::vector<double> hypers) {
  const SlotLists lists = slot_lists(kind, params, grads, {&first, &second, &third}, hyper_of, hypers);
  if (lists.entries.empty()) return;
  STD_TORCH_CHECK(params[0].is_cpu(), "params: not on the CPU");
  struct Part {
    const SlotTensors* tensors;
    int64_t begin, count;
  };
  std::vector<Part> parts;
  for (const SlotTensors& entry : lists.entries) {
    for (int64_t at = 0; at < entry.count; at += kBlockElements)
      parts.push_back({&entry, at, entry.count - at < kBlockElements ? entry.count - at : kBlockElements});
  }
  torch::stable::parallel_for(0, static_cast<int64_t>(parts.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Part& part = parts[static_cast<size_t>(i)];
      slot_step(lists.kind, lists.type, *part.tensors, lists.hypers[static_cast<size_t>(part.tensors->hyper)],
                part.begin, part.count);
    }
  });
}

template <bool kGather>
void move_all(const Tensors& tensors, const Tensor& slab, const std::vector<int64_t>& offsets) {
  STD_TORCH_CHECK(slab.is_cpu(), "slab: not on the CPU");
  const auto count = static_cast<int64_t>(tensors.size());
  auto* const bytes = static_cast<uint8_t*>(slab.data_ptr());
  PackEntry few[kFewEntries];
  std::vector<PackEntry> many(count > kFewEntries ? tensors.size() : 0);
  PackEntry* const entries = many.empty() ? few : many.data();
  if (pack_entries(tensors, slab, offsets, entries) <= kTaskBytes) {
    // Waking a second thread would take as long.
    move_pieces<kGather>(entries, 0, count, bytes);
    return;
  }
  const PackPlan plan = plan_pack(entries, count);
  torch::stable::parallel_for(0, static_cast<int64_t>(plan.tasks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run_task<kGather>(plan, plan.tasks[static_cast<size_t>(i)], bytes);
  });
}

void copy_cpu(Tensors targets, Tensors sources) {
  const std::vector<CopyRun> runs = copy_runs(targets, sources, [](const Tensor& to, const Tensor& from, size_t i) {
    STD_TORCH_CHECK(to.is_cpu() && from.is_cpu(), "copy ", i, ": not on the CPU");
  });
  std::vector<CopyRun> pieces;
  for (const CopyRun& run : runs) {
    for (int64_t at = 0; at < run.size; at += kTaskBytes) {
      const int64_t size = run.size - at < kTaskBytes ? run.size - at : kTaskBytes;
      pieces.push_back({run.to + at, run.from + at, size, nullptr, nullptr});
    }
  }
  const auto move = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const CopyRun& piece = pieces[static_cast<size_t>(i)];
      std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.size));
    }
  };
  // Small ones follow each other on one thread: waking another takes as long.
  torch::stable::parallel_for(0, static_cast<int64_t>(pieces.size()), runs.size() == pieces.size() ? 16 : 1, move);
}

// How many copies a list is, wherever it lies.
int64_t copy_count(Tensors targets, Tensors sources) {
  return static_cast<int64_t>(copy_runs(targets, sources, [](const Tensor&, const Tensor&, size_t) {}).size());
}

void pack_cpu(Tensors sources, Tensor slab, std::vector<int64_t> offsets) { move_all<true>(sources, slab, offsets); }

void unpack_cpu(Tensors targets, Tensor slab, std::vector<int64_t> offsets) { move_all<false>(targets, slab, offsets); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(twinproof, CPU, m) {
  m.impl("offload_adam_step", TORCH_BOX(&adam_step_cpu));
  m.impl("offload_slot_step", TORCH_BOX(&slot_step_cpu));
  m.impl("offload_copy", TORCH_BOX(&copy_cpu));
  m.impl("offload_pack", TORCH_BOX(&pack_cpu));
  m.impl("offload_unpack", TORCH_BOX(&unpack_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(twinproof, CompositeExplicitAutograd, m) {
  m.impl("offload_copy_count", TORCH_BOX(&copy_count));
}
